"""Tensors of classes with ``__tensor_flatten__``: saved by their inner tensors, filled in place, rebuilt by load."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from image_help import header_of, make_image, restore

from tests import wrapped
from tests.wrapped import Coded
from tierfall.core.image.merge import merge_headers
from tierfall.core.load.fill import plan_fill
from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import CaptureError, RestoreError


def coded(seed: int, rows: int = 4, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return Coded.of(torch.randn(rows, 6, generator=generator), **options)


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (lambda: coded(2, rows=5), r"size \(4, 6\).*size \(5, 6\)"),
        (lambda: coded(2, context={"dtype": torch.float16, "block": (1, 6)}), "context"),
        (lambda: torch.zeros(4, 6), r"a tensor of tests.wrapped.Coded, .* torch.Tensor"),
        (lambda: wrapped.Table({"numbers": torch.zeros(4, 6)}, None, (4, 6), (6, 1)), "Table"),
    ],
)
def test_other_wrapper_is_an_error_before_anything_is_written(live: Any, message: str) -> None:
    image, _ = make_image({"a": torch.ones(3), "w": coded(1), "rng": None})
    target = {"a": torch.zeros(3), "w": live(), "rng": None}
    with pytest.raises(RestoreError, match=message):
        restore(target, image)
    assert not target["a"].any()


@pytest.mark.parametrize("context", [object(), {"in": torch.zeros(1)}, lambda: None])
def test_context_without_a_codec_is_refused_with_its_place(context: Any) -> None:
    with pytest.raises(CaptureError, match=r'state\["x"\]\["w"\].*context of tests.wrapped.Coded'):
        walk_state({"x": {"w": coded(1, context=context)}})


def test_class_inside_a_function_is_refused() -> None:
    class Inside(Coded):
        pass

    with pytest.raises(CaptureError, match="top of a module"):
        walk_state({"w": Inside.of(torch.ones(2, 2))})


def test_image_requires_a_reader_that_knows_wrappers() -> None:
    def required(state: Any) -> list[str]:
        image, layout = make_image(state)
        table = json.loads(image[8 : layout.data_start])
        found: list[str] = json.loads(table["__metadata__"]["tierfall"])["requires"]
        return found

    assert required({"x": {"y": [coded(1)]}, "rng": None}) == ["wrappers"]
    assert required({"x": {"w": torch.ones(2), "v": [torch.ones(2)]}, "rng": None}) == []


# Several ranks ---------------------------------------------------------------------------------------


def merged(*states: Any, own: int | None = None) -> Any:
    headers = {rank: header_of(make_image(state)[0]) for rank, state in enumerate(states)}
    return merge_headers(headers, what="1@1 of several ranks", own=own)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"context": {"dtype": torch.float16, "block": (1, 6)}}, "differs between the ranks"),
        ({"rows": 5}, r"w: is .* on rank 0 and .* on rank 1"),
    ],
)
def test_ranks_with_other_wrappers_are_a_conflict_unless_one_has_precedence(
    others: dict[str, Any], message: str
) -> None:
    states = [{"w": coded(1), "rng": None}, {"w": coded(1, **others), "rng": None}]
    with pytest.raises(RestoreError, match=message):
        plan_fill({"w": coded(2), "rng": None}, merged(*states).header)
    found = merged(*states, own=1)
    assert plan_fill({"w": coded(2, **others), "rng": None}, found.header).targets
