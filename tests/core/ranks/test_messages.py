"""A message is what its type says, or an error that names the rank that sent it and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pytest

from tierfall.core.ranks.messages import (
    ErrorMessage,
    Message,
    error_of_rank,
)
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


def changed(place: list[str | int], value: object) -> object:
    body = json.loads(json.dumps(Outer(inner=INNER, copies=(INNER,), sees={4: (1,)}).to_json()))
    at = body
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return body


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (changed(["name"], 7), "name"),
        (changed(["share"], "x"), "share"),
        (changed(["sealed"], 7), "sealed"),
        (changed(["color"], "green"), "color"),
        (changed(["inner"], 5), "inner"),
        (changed(["inner", "id", "attempt"], "a"), "inner.id.attempt"),
        (changed(["copies", 0, "sizes"], [1, None]), "copies.0.sizes.1"),
        (changed(["pair"], [1]), "pair.1"),
        (changed(["pair", 1], None), "pair.1"),
        (changed(["marks"], "ab"), "marks"),
        (changed(["sees"], {"one": []}), "sees.one"),
        (changed(["sees"], {"4": [1.5]}), "sees.4.0"),
        (changed(["topic", 1], []), "topic.1"),
        ([], "message"),
    ],
)
def test_a_malformed_message_names_the_rank_and_the_field(body: object, where: str) -> None:
    with pytest.raises(RanksError) as raised:
        Outer.from_json(body, rank=3)
    assert str(raised.value).startswith(f"rank 3 sent a malformed Outer: {where}")


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
