"""Messages between ranks: frozen dataclasses, their JSON form, and the one place that validates what other ranks send.

The JSON form of a message is a mapping of its fields. A field holds a scalar, a str enum, a column of 64-bit integers
(``Signed``, ``Unsigned``), an error, another dataclass, or a tuple, frozenset, mapping or optional of these.
``from_json`` reads each field by its type hint, so that no later code has to doubt what another rank has sent. A text
of digits counts as a number there, and an unknown member is left out: all ranks run one version of tierfall.
"""

from __future__ import annotations

import base64
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Self, TypeVar, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainValidator, TypeAdapter, ValidationError

from tierfall.core.types.errors import (
    BackendError,
    RanksError,
    TierfallError,
    UnreachableError,
    error_class,
)
from tierfall.core.types.values import CheckpointId

T = TypeVar("T")
Topic = tuple[str | int, ...]
"""The name of what a message is about; each is used once."""


class Message:
    """Base of the frozen dataclasses that ranks send to each other."""

    __slots__ = ()

    def to_json(self) -> dict[str, object]:
        return cast("dict[str, object]", to_json(self))

    @classmethod
    def from_json(cls, body: object, *, rank: int) -> Self:
        """Raises RanksError, which names ``rank``, the sender, and the field, where the body is not such a message."""
        return from_json(cls, body, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMessage(Message):
    """An error of one rank, for the others. ``kind`` is the nearest class of ``core/types/errors.py``."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorMessage:
        if not isinstance(error, TierfallError):
            return cls(kind=RanksError.__name__, text=repr(error))
        known = (k for k in type(error).__mro__ if error_class(k.__name__, RanksError) is k)
        kind = next(k for k in known if issubclass(k, TierfallError))
        if kind.retryable != error.retryable:  # a class of a plug-in
            kind = UnreachableError if error.retryable else BackendError
        return cls(kind=kind.__name__, text=str(error))

    def error(self) -> TierfallError:
        """Return a new error of the same kind and text."""
        return error_class(self.kind, RanksError)(self.text)


def error_of_rank(error: TierfallError, rank: int) -> TierfallError:
    """Return a new error of the same kind whose text names the rank."""
    return replace(ErrorMessage.of(error), text=f"rank {rank}: {error}").error()


@dataclass(frozen=True, slots=True)
class NumberRanges(Message):
    """A set of whole numbers as ascending ranges: ``edges`` are start and end in turn; 0, 1, 2, 5 is (0, 3, 5, 6)."""

    edges: tuple[int, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> NumberRanges:
        ordered = sorted(set(numbers))
        if not ordered:
            return cls()
        inner = [(a + 1, b) for a, b in pairwise(ordered) if b != a + 1]
        return cls((ordered[0], *(n for edges in inner for n in edges), ordered[-1] + 1))

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self.edges[::2], self.edges[1::2], strict=True):
            yield from range(start, end)

    def __contains__(self, number: int) -> bool:
        return bisect(self.edges, number) % 2 == 1


# Writing ---------------------------------------------------------------------------------------------


def to_json(value: object) -> object:
    """Return the JSON form of a message or of a field. Raises TypeError for a value that has none."""
    match value:
        case StrEnum():
            return value.value
        case None | str() | int() | float():
            return value
        case TierfallError():
            return to_json(ErrorMessage.of(value))
        case np.ndarray():
            return base64.b64encode(value.astype(value.dtype.newbyteorder("<")).tobytes()).decode()
        case list() | tuple():
            return [to_json(each) for each in value]
        case frozenset():
            return [to_json(each) for each in sorted(value)]
        case Mapping():
            return {str(key): to_json(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: getattr(value, name) if is_json else to_json(getattr(value, name))
            for name, is_json in _fields_to_write(type(value))
        }
    raise TypeError(f"a message between ranks cannot hold {value!r}")


@cache
def _fields_to_write(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a dataclass, each with whether it holds what is in JSON form already."""
    hints = get_type_hints(kind)
    return tuple(
        (each.name, object in (hints[each.name], *get_args(hints[each.name])))
        for each in fields(kind)
    )


# Reading ---------------------------------------------------------------------------------------------


def from_json(hint: type[T], body: object, *, rank: int) -> T:
    """Read what ``to_json`` returned for a value of type ``hint``. Raises RanksError, which names ``rank``, the sender,
    and the field, if it is of another type."""
    try:
        return cast("T", _adapter(cast("Any", hint)).validate_python(body))
    except ValidationError as error:
        found = error.errors()[0]
        name = getattr(hint, "__name__", str(hint))
        place = ".".join(map(str, found["loc"])) or "message"
        raise RanksError(
            f"rank {rank} sent a malformed {name}: {place}: {found['msg']}; all ranks run one version of tierfall"
        ) from None


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _column(dtype: type[np.generic]) -> PlainValidator:
    def read(body: object) -> NDArray[Any]:
        data = base64.b64decode(body, validate=True) if isinstance(body, str) else None
        if data is None or len(data) % 8:
            raise ValueError(f"expected a column of {dtype.__name__}")
        return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype)

    return PlainValidator(read)


def _checkpoint_of(text: object) -> object:
    step, _, attempt = str(text).partition("@")
    return {"step": step, "attempt": attempt}


Signed = Annotated[NDArray[np.int64], _column(np.int64)]
Unsigned = Annotated[NDArray[np.uint64], _column(np.uint64)]
"""Columns of a message."""
CheckpointKey = Annotated[CheckpointId, BeforeValidator(_checkpoint_of)]
"""A checkpoint that is the key of a mapping in a message."""
