"""Every value that may stand in a state comes back as it was; everything else is refused with its path."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from image_help import make_image, restore, saved_and_loaded

from tierfall.core.state.walk import walk_state
from tierfall.core.tensors import value_codec
from tierfall.core.tensors.value_codec import register_codec
from tierfall.core.types.errors import CaptureError, ConfigError, RestoreError


@dataclass
class Point:
    x: int
    y: object = None


class Color(Enum):
    RED = "r"
    BLUE = ("b", 1)


class Pair(NamedTuple):
    left: object
    right: object = 0


@pytest.mark.parametrize(
    "make",
    [
        lambda t: deque([t, 1]),
        lambda t: defaultdict(list, a=[t]),
        lambda t: Pair(t, {"b": t}),
        lambda t: Point(3, [t]),
        lambda t: SimpleNamespace(t=t),
    ],
)
def test_such_a_container_may_hold_tensors(make: Callable[[torch.Tensor], Any]) -> None:
    value = make(torch.arange(5.0))
    back = saved_and_loaded(value)
    assert type(back) is type(value)
    assert str(back) == str(value)


def test_a_class_that_changed_is_refused_before_anything_is_written_or_takes_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(value: object, name: str, kind: type) -> Any:
        kind.__qualname__ = name
        kind.__module__ = __name__
        image, _ = make_image({"w": torch.ones(2), "v": value, "rng": None})
        state = {"w": torch.zeros(2), "v": None, "rng": None}
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], name, kind)
            try:
                restore(state, image)
            except RestoreError:
                assert state["w"].tolist() == [0, 0]
                raise
        return state["v"]

    with pytest.raises(RestoreError, match="Color has no member 'RED' any more"):
        changed(Color.RED, "Color", Enum("Color", {"GREEN": 1}))
    with pytest.raises(RestoreError, match="Pair has 1 fields now, and the checkpoint 2"):
        changed(Pair(1), "Pair", NamedTuple("Pair", [("left", int)]))
    with pytest.raises(RestoreError, match="Point has other fields now than in the checkpoint: y"):
        changed(Point(1), "Point", make_dataclass("Point", ["x"]))
    with pytest.raises(RestoreError, match=r"other fields .*: z"):
        changed(Point(1), "Point", make_dataclass("Point", ["x", "y", "z"]))
    more = make_dataclass(
        "Point", ["x", "y", ("z", int, 5), ("k", list, field(default_factory=list))]
    )
    found = changed(Point(1), "Point", more)
    assert (found.x, found.y, found.z, found.k) == (1, None, 5, [])


def test_nothing_is_imported_or_called_for_a_class_that_a_checkpoint_names() -> None:
    for name in (
        "py:enum:os:system",
        "py:dataclass:subprocess:Popen",
        "py:namedtuple:antigravity:x",
    ):
        assert value_codec.codec_named(name) is None
    assert "antigravity" not in sys.modules
    for name in ("py:", "py:deque:-1", "py:defaultdict:eval", "py:deque:x", "py:nothing", "other"):
        assert value_codec.codec_named(name) is None


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_limited_and_the_limit_can_be_used() -> None:
    assert saved_and_loaded(nested(value_codec.DEPTH_MAX)) == nested(value_codec.DEPTH_MAX)
    with pytest.raises(CaptureError, match="nested deeper"):
        walk_state({"deep": nested(value_codec.DEPTH_MAX + 2)})


class Fraction:
    def __init__(self, top: object, bottom: object) -> None:
        self.top, self.bottom = top, bottom


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_codec, "_BY_TYPE", dict(value_codec._BY_TYPE))
    monkeypatch.setattr(value_codec, "_BY_NAME", dict(value_codec._BY_NAME))
    register_codec(Fraction, "fraction", lambda f: [f.top, f.bottom], lambda v: Fraction(*v))


def test_codec_that_cannot_encode_is_reported_with_the_place_of_the_value(registered: None) -> None:
    register_codec(Fraction, "fraction", lambda f: [f.top, f.gone], lambda v: Fraction(*v))
    with pytest.raises(CaptureError, match=r'state\["a"\]\[1\].*codec .fraction.*gone') as caught:
        walk_state({"a": [0, Fraction(1, 2)]})
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.usefixtures("registered")
def test_what_was_saved_under_an_older_name_of_a_type_is_still_read() -> None:
    image, _ = make_image({"f": Fraction(1, 2), "rng": None})
    register_codec(Fraction, "ratio", lambda f: [f.top, f.bottom], lambda v: Fraction(*v))
    state = {"f": None, "rng": None}
    restore(state, image)
    assert (state["f"].top, state["f"].bottom) == (1, 2)
    image, _ = make_image({"f": Fraction(3, 4), "rng": None})
    assert b"ratio" in image
    with pytest.raises(ConfigError, match="belongs to Fraction"):
        register_codec(Point, "fraction", str, Point)
