"""``tierfall.block`` on one rank: what it refuses, and what a restore fills. Layouts of several ranks: test_ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierfall
from tests.contract.kit import Place
from tierfall.errors import CaptureError, ConfigError, RestoreError

WHOLE = torch.arange(24.0).view(4, 6)
UPPER, LOWER = WHOLE[:2], WHOLE[2:]


@dataclass
class Holder:
    weight: object


def block(tensor: Any, offset: Any = (0, 0), shape: Any = (4, 6)) -> Any:
    return tierfall.block(tensor, shape=shape, offset=offset)


def restored(place: Place, saved: Any, live: Any, run: str = "run", **how: Any) -> Any:
    """Save a state of one entry, and restore it into another."""
    with tierfall.open(place.config(run=run)) as ckpt:
        ckpt.save(1, {"w": saved}, block=True)
    state = {"w": live}
    with tierfall.open(place.config(run=run)) as ckpt:
        ckpt.restore(state, **how)
    return state["w"]


@pytest.mark.parametrize(
    ("tensor", "offset", "why"),
    [
        (WHOLE[0], (0, 0), "unsqueeze"),
        (UPPER, (3, 0), "outside"),
        (UPPER, (-1, 0), "outside"),
        (UPPER, (0.5, 0), "integer"),
        (np.zeros((2, 6)), (0, 0), "plain tensor"),
        ([UPPER, LOWER], [(0, 0)], "list of 2"),
        ([UPPER, WHOLE[1:3]], [(0, 0), (1, 0)], "overlap"),
        ([UPPER, LOWER.half()], [(0, 0), (2, 0)], "one dtype"),
    ],
)
def test_a_block_that_cannot_be_is_refused(tensor: Any, offset: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        block(tensor, offset)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"held": Holder(block(WHOLE))}, "held.*dict, list or tuple"),
        ({"all": block([UPPER, LOWER], [(0, 0), (2, 0)]), "some": block(UPPER)}, "some.*clone"),
        ({"meta": block(WHOLE.to("meta"))}, "meta.*no data"),
    ],
)
def test_a_state_with_a_block_that_could_not_come_back_is_refused(
    place: Place, state: dict[str, Any], why: str
) -> None:
    with tierfall.open(place.config()) as ckpt, pytest.raises(CaptureError, match=why):
        ckpt.save(1, state)


BOTH = [(0, 0), (2, 0)]


def test_a_view_of_a_parameter_is_filled_in_place_and_nothing_beside_it(place: Place) -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    restored(place, block([UPPER, LOWER], BOTH), block(weight[1:3, 2:4], (1, 2)))
    expected = torch.zeros(4, 6)
    expected[1:3, 2:4] = WHOLE[1:3, 2:4]
    assert torch.equal(weight, expected)


def test_a_block_may_be_the_whole_and_a_whole_be_cut_into_blocks(place: Place) -> None:
    assert torch.equal(restored(place, block(WHOLE), torch.zeros(4, 6)), WHOLE)
    parts = [torch.zeros(4, 5).t().clone().t(), torch.zeros(4, 1)]
    restored(place, WHOLE, block(parts, [(0, 0), (0, 5)]), run="other")
    assert torch.equal(torch.cat(parts, 1), WHOLE)


def test_resize_fills_what_both_wholes_have(place: Place) -> None:
    upper, lower = torch.full((3, 7), -1.0), torch.full((2, 7), -1.0)
    restored(place, WHOLE, block([upper, lower], [(0, 0), (3, 0)], (5, 7)), resize=["w"])
    now = torch.cat([upper, lower])
    assert torch.equal(now[:4, :6], WHOLE)
    assert (now[4:] == -1).all()
    assert (now[:, 6] == -1).all()


@pytest.mark.parametrize(
    ("saved", "live", "why"),
    [
        (WHOLE, block(UPPER.clone(), shape=(5, 6)), r"\(4, 6\).*\(5, 6\)"),
        (WHOLE, block(UPPER.half()), "float16"),
        (3, block(UPPER.clone()), "plain value.*blocks of a tensor"),
        (block(UPPER), torch.zeros(4, 6), "12 of its 24 elements; .*same blocks; skip="),
        (block([], []), block(UPPER.clone()), "none in the checkpoint"),
    ],
)
def test_a_block_that_the_checkpoint_lacks_is_named(
    place: Place, saved: Any, live: Any, why: str
) -> None:
    with pytest.raises(RestoreError, match=f"(?s)w: .*{why}"):
        restored(place, saved, live)


def test_a_part_of_a_tensor_is_never_loaded_as_the_whole(place: Place) -> None:
    with tierfall.open(place.config()) as ckpt:
        ckpt.save(1, {"w": block(LOWER, (2, 0)), "v": UPPER}, block=True)
    with pytest.raises(RestoreError, match=r"w: .*12 of its 24 elements"):
        tierfall.load(place.config())
    assert torch.equal(tierfall.load(place.config(), only=["v"])["v"], UPPER)
    with tierfall.open_tensors(place.config()) as found:
        assert torch.equal(found["v"], UPPER)
        with pytest.raises(RestoreError, match="w is incomplete"):
            found.slice("w")


def test_memory_that_is_two_blocks_of_other_values_is_refused(place: Place) -> None:
    """Layers that share their weight in the state, and not in the checkpoint."""
    shared = torch.full((2, 6), -1.0)
    for run, saved in (("whole", WHOLE), ("blocks", block([UPPER, LOWER], BOTH))):
        with pytest.raises(RestoreError, match="shares memory"):
            restored(place, saved, block([shared, shared], BOTH), run)
        assert (shared == -1).all()


def test_a_block_of_two_names_is_one_tensor_in_any_layout(place: Place) -> None:
    weight, now = WHOLE.clone(), torch.zeros(2, 6)
    restored(
        place,
        {"embedding": block(weight), "head": block(weight)},
        {"embedding": block(now, (1, 0)), "head": block(now, (1, 0))},
    )
    assert torch.equal(now, WHOLE[1:3])


def test_a_change_of_a_block_is_a_change_of_the_state(place: Place) -> None:
    """The last step is saved at the end, unless the state has changed since."""
    weight = WHOLE.clone()
    with tierfall.open(place.config(interval={"every": 100})) as ckpt:
        ckpt.maybe_save(1, {"w": block(weight)})
        ckpt.maybe_save(2, {"w": block(weight)})
        weight.add_(1)
    with tierfall.open(place.config()) as ckpt:
        assert ckpt.checkpoints() == []
