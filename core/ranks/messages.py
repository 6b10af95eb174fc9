"""Messages between ranks: frozen dataclasses, their JSON form, and the one place that validates what other ranks send.

The JSON form of a message is the list of its fields, in their order. A field holds a scalar, a str enum, a numpy
column of 64-bit integers, an error, another dataclass, or a tuple, frozenset, mapping or optional of these.
``from_json`` checks each field against its type hint, so that no later code has to doubt what another rank has sent.
"""

from __future__ import annotations

import base64
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache, partial
from itertools import pairwise, repeat
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

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

    def to_json(self) -> list[object]:
        return cast("list[object]", to_json(self))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTopic:
    """The topic of a message about one checkpoint. ``number`` tells repeated messages of one kind apart."""

    kind: str
    id: CheckpointId
    tier: str = ""
    number: int = 0

    @property
    def key(self) -> Topic:
        return self.kind, self.id.step, self.id.attempt, self.tier, self.number

    @classmethod
    def parse(cls, topic: Topic) -> CheckpointTopic:
        kind, step, attempt, tier, number = topic
        id = CheckpointId(int(step), int(attempt))
        return cls(kind=str(kind), id=id, tier=str(tier), number=int(number))


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
        return [
            getattr(value, name) if is_json else to_json(getattr(value, name))
            for name, is_json in _fields_to_write(type(value))
        ]
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


class _MalformedError(Exception):
    """``place`` is the path of the field, which grows while the error passes the containers around it."""

    def __init__(self, expected: str, found: object) -> None:
        shown = repr(found)
        self.text = f"expected {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}"
        self.place = ""


def from_json(hint: type[T], body: object, *, rank: int) -> T:
    """Read what ``to_json`` returned for a value of type ``hint``. Raises RanksError, which names ``rank``, the sender,
    and the field, where it is of another type."""
    try:
        return cast("T", _reader(cast("Any", hint))(body))
    except _MalformedError as error:
        name = getattr(hint, "__name__", str(hint))
        raise RanksError(
            f"rank {rank} sent a malformed {name}: {error.place.lstrip('.') or 'message'}: {error.text}; all ranks run "
            "one version of tierfall"
        ) from None


_Reader = Callable[[object], object]


@cache
def _reader(hint: Any) -> _Reader:
    hint = _without_alias(hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint in (object, Any):
        return lambda body: body
    if hint in (bool, int, float, str, NoneType):
        return partial(_scalar, hint)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return partial(_fixed_tuple, [_reader(arg) for arg in args])
    if origin in (tuple, frozenset):
        return partial(_sequence, origin, _reader(args[0]))
    if origin is not None and issubclass(origin, Mapping):
        keys: dict[Any, Callable[[str], object]] = {int: int, CheckpointId: _checkpoint_of}
        return partial(_mapping, keys.get(args[0], str), _reader(args[1]))
    if origin is np.ndarray:
        return partial(_column, np.dtype(get_args(args[1])[0]))
    if isinstance(hint, type):
        return _reader_of_class(hint)
    raise TypeError(f"a message between ranks cannot hold a {hint}")


def _reader_of_class(hint: type) -> _Reader:
    if issubclass(hint, StrEnum):
        return partial(_enum, hint)
    if hint is TierfallError:
        message = _reader(ErrorMessage)
        return lambda body: cast("ErrorMessage", message(body)).error()
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        names = [each.name for each in fields(hint)]
        return partial(_dataclass, hint, names, [_reader(hints[name]) for name in names])
    raise TypeError(f"a message between ranks cannot hold a {hint}")


def _without_alias(hint: Any) -> Any:
    """Return what a type alias stands for. ``NDArray`` is one since NumPy 2.5, on Python 3.12 and later."""
    value = getattr(get_origin(hint), "__value__", None)
    return hint if value is None else value[get_args(hint)]


def _scalar(kind: type, body: object) -> object:
    if kind is float and isinstance(body, int | float) and not isinstance(body, bool):
        return float(body)
    if isinstance(body, kind) and (kind is bool or not isinstance(body, bool)):
        return body
    raise _MalformedError("null" if kind is NoneType else kind.__name__, body)


def _union(args: Sequence[Any]) -> _Reader:
    """Read ``X | None``, or one of several scalars."""
    kinds = [arg for arg in args if arg is not NoneType]
    if len(kinds) == 1:
        read = _reader(kinds[0])
        return lambda body: None if body is None else read(body)
    expected = " or ".join(kind.__name__ for kind in kinds)
    return partial(_one_of, tuple(kinds), expected, len(kinds) < len(args))


def _one_of(kinds: tuple[type, ...], expected: str, is_optional: bool, body: object) -> object:
    if (body is None and is_optional) or isinstance(body, kinds):
        return body
    raise _MalformedError(expected, body)


def _list(body: object, length: int | None = None) -> Sequence[object]:
    if not isinstance(body, list | tuple) or length not in (None, len(body)):
        raise _MalformedError("a list" if length is None else f"a list of {length}", body)
    return body


def _sequence(kind: type, read: _Reader, body: object) -> object:
    return kind(_items(_list(body), repeat(read)))


def _fixed_tuple(readers: Sequence[_Reader], body: object) -> object:
    return tuple(_items(_list(body, len(readers)), readers))


def _items(
    values: Sequence[object], readers: Iterable[_Reader], names: Sequence[str] = ()
) -> list[object]:
    found: list[object] = []
    try:
        for value, read in zip(values, readers, strict=False):
            found.append(read(value))
    except _MalformedError as error:
        place = f".{names[len(found)]}" if names else f"[{len(found)}]"
        error.place = f"{place}{error.place}"
        raise
    return found


def _checkpoint_of(text: str) -> CheckpointId:
    step, attempt = text.split("@")
    return CheckpointId(int(step), int(attempt))


def _mapping(read_key: Callable[[str], object], read: _Reader, body: object) -> object:
    if not isinstance(body, Mapping):
        raise _MalformedError("an object", body)
    found: dict[object, object] = {}
    for key, value in body.items():
        try:
            found[read_key(str(key))] = read(value)
        except ValueError:
            raise _MalformedError("a whole number as a key", key) from None
        except _MalformedError as error:
            error.place = f"[{key}]{error.place}"
            raise
    return found


def _column(dtype: np.dtype[Any], body: object) -> object:
    try:
        data = base64.b64decode(body, validate=True) if isinstance(body, str) else None
    except ValueError:
        data = None
    if data is None or len(data) % dtype.itemsize:
        raise _MalformedError(f"a column of {dtype}", body)
    return np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype)


def _enum(kind: type[StrEnum], body: object) -> object:
    if body not in tuple(kind):
        raise _MalformedError(f"one of {', '.join(kind)}", body)
    return kind(cast("str", body))


def _dataclass(
    kind: type, names: Sequence[str], readers: Sequence[_Reader], body: object
) -> object:
    found = _items(_list(body, len(names)), readers, names)
    return kind(**dict(zip(names, found, strict=True)))
