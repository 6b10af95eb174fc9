"""The samples that ranks read of replicas are of the same bytes on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.fake_device import FakeStream, FakeStreams, OnDevice
from tierfall.core.image.dedup import (
    ReplicaDigests,
    ReplicatedTensors,
    assign_writers,
    digests_agree,
    find_difference,
)
from tierfall.core.image.layout import plan_layout
from tierfall.core.sampling import replicas
from tierfall.core.sampling.replicas import ReplicaPlan
from tierfall.core.state.item import item
from tierfall.core.state.walk import walk_state

NOWHERE = FakeStreams(None)
SIZES = (1, 3, 16, 31, 33, 40, 100, 1000, 5000, 70_000)
"""In elements of four bytes: shorter than a line, than all lines that are read, and longer."""
SAVES = 12

State = dict[str, Any]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{size}": torch.randn(size, generator=generator) for size in SIZES}


def state_of(values: dict[str, torch.Tensor]) -> State:
    return {name: item(value, changes="on_step") for name, value in values.items()}


def elsewhere(values: dict[str, torch.Tensor], at: int) -> dict[str, torch.Tensor]:
    """The same values in other memory: one after the other in one buffer, from an odd place on."""
    memory = torch.empty(at + sum(value.numel() for value in values.values()))
    made = {}
    for name, value in values.items():
        made[name] = memory[at : at + value.numel()].copy_(value)
        at += value.numel()
    return made


class Ranks:
    """Ranks that share what they hold; ``streams`` is of each."""

    def __init__(self, *states: State, streams: Any = NOWHERE) -> None:
        self.states = states
        self.streams = streams
        views = [walk_state(state) for state in states]
        self.shares = [ReplicatedTensors(v, plan_layout(v).structure, 1 << 20) for v in views]
        self.division = assign_writers([share.table for share in self.shares])
        self.plans = [ReplicaPlan(share, self.division) for share in self.shares]

    def read(self, ordinal: int) -> dict[int, ReplicaDigests]:
        pairs = zip(self.plans, self.states, strict=True)
        readings = [plan.read(walk_state(state), ordinal, self.streams) for plan, state in pairs]
        return {rank: reading.digests() for rank, reading in enumerate(readings)}

    def alike(self, ordinal: int) -> bool:
        return digests_agree({r: digests.by_group() for r, digests in self.read(ordinal).items()})

    def found(self, ordinal: int) -> str | None:
        found = find_difference(self.read(ordinal))
        return None if found is None else self.shares[0].names()[found.key]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RANGE_BYTES", 4096)
    monkeypatch.setattr(replicas, "DIGEST_BYTES", 32 << 10)


@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.usefixtures("small_ranges")
def test_ranks_that_are_alike_are_so_wherever_their_tensors_lie(at: int) -> None:
    values = tensors()
    values["t1000"][::3] = float("nan")
    ranks = Ranks(state_of(values), state_of(elsewhere(values, at)), state_of(elsewhere(values, 3)))
    assert len(ranks.division.keys) == len(SIZES)
    for ordinal in range(1, SAVES):
        assert ranks.alike(ordinal)
        assert ranks.found(ordinal) is None


@pytest.mark.parametrize("seed", range(2))
def test_what_is_not_alike_all_over_is_found_at_once_in_each_tensor(seed: int) -> None:
    both = tensors(), tensors(seed=seed + 1)
    for name in both[0]:
        mixed = tensors() | {name: both[1][name]}
        ranks = Ranks(state_of(both[0]), state_of(mixed))
        for ordinal in range(seed, 1000, 331):
            assert not ranks.alike(ordinal)
            assert ranks.found(ordinal) == name


@pytest.mark.parametrize("size", [1, 33, 5000, 70_000])
@pytest.mark.usefixtures("small_ranges")
def test_one_bit_anywhere_is_found_within_a_rotation_of_any_beginning(size: int) -> None:
    values, other = tensors(), tensors()
    ranks = Ranks(state_of(values), state_of(other))
    turns = -(-sum(4 * s for s in SIZES) // (32 << 10))
    bits = other[f"t{size}"].view(torch.int32)
    for place in {0, size // 3, size // 2, size - 1}:
        bits[place] ^= 1
        found = [ranks.found(ordinal) for ordinal in range(5, 5 + turns)]
        assert set(found) - {None} == {f"t{size}"}
        some = [not ranks.alike(ordinal) for ordinal in range(5, 5 + turns)]
        assert some == [name is not None for name in found]
        bits[place] ^= 1
        assert all(ranks.alike(ordinal) for ordinal in range(1, 1 + turns))


def in_channels_last(seed: int) -> State:
    torch.manual_seed(seed)
    return {"conv": nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last)}


def in_part(seed: int) -> State:
    torch.manual_seed(seed)
    return {
        "part": nn.Parameter(torch.randn(64, 64)[:, 3:40]),
        "whole": nn.Parameter(torch.ones(9)),
    }


def conjugated(seed: int) -> State:
    torch.manual_seed(seed)
    return {"c": item(torch.randn(40, dtype=torch.complex64).conj(), changes="on_step")}


@pytest.mark.parametrize("make", [in_channels_last, in_part, conjugated])
def test_tensors_that_do_not_lie_in_order_are_alike_where_they_are(
    make: Callable[[int], State],
) -> None:
    ranks = Ranks(make(0), make(0))
    assert len(ranks.division.keys)
    assert all(ranks.alike(ordinal) for ordinal in range(SAVES))


def test_tensors_of_which_one_is_a_slice_are_no_replicas() -> None:
    """The bytes that are sampled of the two would differ, though the tensors are equal."""
    wide = torch.randn(8, 16)
    states = [state_of({"w": each}) for each in (wide[:, :4], wide[:, :4].contiguous())]
    assert not len(Ranks(*states).division.keys)


# On devices ------------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    made = FakeStream()
    yield made
    made.close()


def on_device(seed: int = 0) -> dict[str, torch.Tensor]:
    made = {name: value.as_subclass(OnDevice) for name, value in tensors(seed).items()}
    made["short"] = torch.tensor([seed, 2, 3], dtype=torch.int16).as_subclass(OnDevice)
    return made


class DeviceRanks(Ranks):
    """The tensors of a walk are plain ones: these say that they lie on a device."""

    def __init__(self, *values: dict[str, torch.Tensor], stream: FakeStream | None) -> None:
        self.values = values
        super().__init__(*map(state_of, map(_plain, values)), streams=FakeStreams(stream))

    def read(self, ordinal: int) -> dict[int, ReplicaDigests]:
        found = {}
        for rank, (plan, values) in enumerate(zip(self.plans, self.values, strict=True)):
            view = walk_state(self.states[rank])
            both = zip(view.names, view.sources, strict=True)
            view.sources[:] = [values.get(name, source) for name, source in both]
            found[rank] = plan.read(view, ordinal, self.streams).digests()
        return found


def _plain(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.as_subclass(torch.Tensor) for name, value in values.items()}


def test_tensors_on_devices_are_summed_in_turns_and_each_turn_has_some(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SUMS_TENSORS", 3)
    alike = DeviceRanks(on_device(), on_device(), stream=stream)
    assert all(alike.alike(ordinal) for ordinal in range(8))
    apart = DeviceRanks(on_device(), on_device(seed=1), stream=stream)
    assert not any(apart.alike(ordinal) for ordinal in range(8))
    for name in on_device():
        other = on_device()
        other[name].as_subclass(torch.Tensor).view(torch.int16)[-1] += 1
        found = [DeviceRanks(on_device(), other, stream=stream).found(n) for n in range(4)]
        assert set(found) - {None} == {name}


def test_what_a_device_cannot_sum_up_is_no_difference(stream: FakeStream) -> None:
    ranks = DeviceRanks(on_device(), on_device(), stream=stream)
    whole = ranks.read(1)
    stream.no_room = True
    less = ranks.read(1)
    assert whole[0].by_group()
    assert not less[1].by_group()
    assert digests_agree({0: whole[0].by_group(), 1: less[1].by_group()})
