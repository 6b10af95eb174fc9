"""A run that restores onto a fake device: from each tier, and no memory stays locked after close."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import tierfall
from tests.core.fake_device import FakeLocks, FakeStream, FakeStreams, OnDevice
from tierfall import api
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import plan_load
from tierfall.core.runtime.cores import THREADS_MAX
from tierfall.run import checkpointer

MakeConfig = Callable[..., dict[str, Any]]
CHUNKS_MIN = 6
"""The state is of more than 96 KiB, in chunks of 16."""


def onto_device(make_plan: Callable[..., Any]) -> Callable[..., Any]:
    """Let a plan's targets that are no byte long values lie on the device that is none."""

    def make(*arguments: Any, **options: Any) -> Any:
        plan = make_plan(*arguments, **options)
        fills = tuple(
            dataclasses.replace(fill, targets=tuple(t.as_subclass(OnDevice) for t in fill.targets))
            for fill in plan.fills
        )
        return dataclasses.replace(plan, fills=fills)

    return make


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> FakeLocks:
    return FakeLocks(monkeypatch)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStream]:
    made = FakeStream()
    monkeypatch.setattr("tierfall.core.copies.buffer_ring.Streams", lambda: FakeStreams(made))
    monkeypatch.setattr(checkpointer, "plan_fill", onto_device(plan_fill))
    monkeypatch.setattr(api, "plan_load", onto_device(plan_load))
    yield made
    made.close()


def tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    moments = [t for one in state["optimizer"].state.values() for t in one.values()]
    return [*state["model"].parameters(), *moments]


def same(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = list(zip(tensors(state), tensors(other), strict=True))
    return len(pairs) > 4 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("compress", [None, "zstd", "planes"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_state_comes_back_bit_for_bit_and_closing_unlocks_the_buffers(
    tier: str,
    compress: str | None,
    make_config: MakeConfig,
    make_state: Callable[[int], dict[str, Any]],
    stream: FakeStream,
    locks: FakeLocks,
) -> None:
    disk = {} if compress is None else {"compress": {"codec": compress}}
    saved = make_state(1)
    with tierfall.open(make_config(chunk="16KiB", disk=disk)) as ckpt:
        ckpt.save(1, saved, block=True)
        arena = len(locks.made)
        for seed in (2, 3):
            state = make_state(seed)
            assert ckpt.restore(state, tier=tier) is not None
            assert same(state, saved)
        assert len(stream.enqueued) >= 2 * CHUNKS_MIN
        buffers = locks.made[arena:]
        assert 1 <= len(buffers) <= THREADS_MAX + 2
        assert locks.unlocked == []
    assert len(locks.unlocked) == len(locks.made)
