"""A message is what its type says, or an error that names the rank that sent it and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from tierfall.core.ranks.messages import ErrorMessage, Message, error_of_rank
from tierfall.core.types.errors import FencedError, KeyNotFoundError, RanksError, UnreachableError
from tierfall.core.types.values import CheckpointId


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Message):
    id: CheckpointId
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Message):
    name: str = "a"
    share: float = 0.5
    sealed: bool = True
    color: Color = Color.RED
    inner: Inner | None = None
    copies: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (1, "b")
    marks: frozenset[str] = frozenset()
    sees: Mapping[int, tuple[int, ...]] | None = None
    topic: tuple[str | int, ...] = ("x", 1)
    rest: object = None


INNER = Inner(id=CheckpointId(400, 7), sizes=(1, 2))


@pytest.mark.parametrize(
    "message",
    [
        Outer(),
        Outer(inner=INNER, copies=(INNER, INNER), marks=frozenset("ab"), sees={0: (1,), 12: ()}),
        Outer(share=float("inf"), color=Color.BLUE, rest=[1, {"a": None}]),
    ],
)
def test_a_message_comes_back_as_it_was(message: Outer) -> None:
    assert Outer.from_json(json.loads(json.dumps(message.to_json())), rank=3) == message
    assert Outer.from_json(message.to_json(), rank=3) == message


def changed(place: list[int], value: object) -> object:
    body = json.loads(json.dumps(Outer(inner=INNER, copies=(INNER,), sees={4: (1,)}).to_json()))
    at = body
    for number in place[:-1]:
        at = at[number]
    at[place[-1]] = value
    return body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (changed([0], 7), "name: expected str, got 7"),
        (changed([1], "x"), "share: expected float, got 'x'"),
        (changed([2], 1), "sealed: expected bool, got 1"),
        (changed([3], "green"), "color: expected one of red, blue, got 'green'"),
        (changed([4], 5), "inner: expected a list of 2, got 5"),
        (changed([4, 0, 1], True), "inner.id.attempt: expected int, got True"),
        (changed([5, 0, 1], [1, "2"]), "copies[0].sizes[1]: expected int, got '2'"),
        (changed([6], [1]), "pair: expected a list of 2, got [1]"),
        (changed([6, 1], None), "pair[1]: expected str, got None"),
        (changed([7], "ab"), "marks: expected a list, got 'ab'"),
        (changed([8], {"one": []}), "sees: expected a whole number as a key, got 'one'"),
        (changed([8], {"4": [1.5]}), "sees[4][0]: expected int, got 1.5"),
        (changed([9, 1], 2.5), "topic[1]: expected str or int, got 2.5"),
        ({}, "message: expected a list of 11, got {}"),
    ],
)
def test_a_malformed_message_names_the_rank_and_the_field(body: object, why: str) -> None:
    with pytest.raises(RanksError) as raised:
        Outer.from_json(body, rank=3)
    assert str(raised.value).startswith(f"rank 3 sent a malformed Outer: {why}; all ranks run")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns(Message):
    keys: NDArray[np.uint64]
    owners: NDArray[np.int64]


def test_columns_keep_their_values_and_types() -> None:
    keys = np.array([0, 2**64 - 1], dtype=np.uint64)
    owners = np.array([-1, 5, 0], dtype=np.int64)
    body = json.loads(json.dumps(Columns(keys=keys, owners=owners).to_json()))
    found = Columns.from_json(body, rank=0)
    assert (found.keys.dtype, found.owners.dtype) == (np.uint64, np.int64)
    assert found.keys.tolist() == keys.tolist()
    assert found.owners.tolist() == owners.tolist()
    for text in ("AAA=", "not base64!", 5):
        with pytest.raises(RanksError, match="keys: expected a column of uint64"):
            Columns.from_json([text, body[1]], rank=0)


ScalarT = TypeVar("ScalarT", bound=np.generic)
Aliased = TypeAliasType("Aliased", np.ndarray[Any, np.dtype[ScalarT]], type_params=(ScalarT,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AliasedColumn(Message):
    keys: Aliased[np.uint64]


def test_a_column_may_be_declared_by_a_type_alias() -> None:
    """From NumPy 2.5 on, and Python 3.12, ``NDArray`` is one."""
    column = AliasedColumn(keys=np.array([0, 2**64 - 1], dtype=np.uint64))
    found = AliasedColumn.from_json(json.loads(json.dumps(column.to_json())), rank=0)
    assert found.keys.dtype == np.uint64
    assert found.keys.tolist() == column.keys.tolist()


class PluginError(RanksError):
    retryable = True


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FencedError("x"), FencedError),
        (KeyNotFoundError("x"), KeyNotFoundError),
        (PluginError("x"), UnreachableError),
        (ZeroDivisionError("x"), RanksError),
    ],
)
def test_an_error_of_another_rank_is_of_the_nearest_known_kind(
    error: BaseException, kind: type[BaseException]
) -> None:
    body = json.loads(json.dumps(ErrorMessage.of(error).to_json()))
    found = ErrorMessage.from_json(body, rank=2)
    assert type(found.error()) is kind
    assert type(error_of_rank(found.error(), 2)) is kind
    assert str(error_of_rank(found.error(), 2)).startswith("rank 2: ")
    assert "x" in str(found.error())
