"""A fingerprint of a live state: enough of it to tell later whether it was changed.

It covers version counters and addresses of the state's tensors, and samples of those in host memory: of all tensors, as
long as that takes a percent of a training step, and otherwise of as many as that allows, at least TENSORS_MIN, drawn at
random. What is left of that time goes into more samples. It remembers where tensors are found and not the tensors
themselves: one that was replaced is seen, none is kept alive, and none has a weak reference, with which torch refuses
to swap it for another.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.sampling.samples import (
    LINES_MAX,
    SampledRange,
    SamplePlan,
    Samples,
    WholeDigests,
)
from tierfall.core.state.item import unwrap
from tierfall.core.tensors import names, value_codec
from tierfall.core.tensors.dtensor import any_sharded, local_tensor
from tierfall.core.tensors.tensors import readable_bytes

TENSORS_MIN = 256
TENSOR_S = 2e-6
"""The time that one tensor is taken to cost."""
STEP_SHARE = 0.01
"""Of a training step, the share that a fingerprint may take."""
LEAST_S = 5e-4
"""The time that a fingerprint may take however short a step is."""
LINE_S = 5e-8
"""The time that one cache line is taken to cost."""
LINES_MIN = 9
"""Cache lines of one tensor: the first, the last, and others between."""
WHOLE_BYTES = 1 << 10
"""A tensor of no more is digested whole."""
_PLAIN_KINDS = (torch.Tensor, nn.Parameter)
Step = Callable[[Any], Any]
"""Goes from a thing to another in it; raises LookupError, AttributeError or TypeError where that is not there."""
_GONE = (LookupError, AttributeError, TypeError)


class _Holder(NamedTuple):
    """What holds tensors, or other holders: found by ``step`` from the holder number ``parent``."""

    parent: int
    step: Step


class _TensorPath(NamedTuple):
    """Where a tensor is found: by ``step`` from the holder number ``holder``."""

    trail: names.Trail
    holder: int
    step: Step


class Fingerprint:
    """The fingerprint of one state. ``take`` takes it anew, ``changed`` names a tensor that differs from it."""

    def __init__(self, state: Mapping[Any, object], step_s: float | None = None) -> None:
        """``step_s`` says how long a training step takes."""
        self._map = _StateMap(state)
        budget_s = max(LEAST_S, STEP_SHARE * (step_s or 0.0))
        self._map.choose(max(TENSORS_MIN, int(budget_s / TENSOR_S)))
        self._places = self._map.places
        tensor_s = budget_s / max(1, len(self._places)) - TENSOR_S
        self._lines = min(LINES_MAX, max(LINES_MIN, int(tensor_s / LINE_S)))
        self._keys = tuple(state)
        self._plan: _SamplingPlan | None = None
        found, self._counts = self._find(state)
        self._seen = self._look(found)

    def take(self, state: Mapping[Any, object]) -> bool:
        """Take it anew; False where the state has other entries by now, or a tensor is gone."""
        found, counts = self._find(state)
        if self._keys != tuple(state) or counts != self._counts or None in map(_is_none, found):
            return False
        self._seen = self._look(found)
        return True

    def changed(self, state: Mapping[Any, object]) -> str | None:
        """Name a tensor that was written to, replaced or moved since; None where none was."""
        found, _ = self._find(state)
        for place, tensor in zip(self._places, found, strict=True):
            if tensor is None:
                return names.path(place.trail)
        before, now = self._seen, self._look(found)
        for at, place in enumerate(self._places):
            if (now.versions[at], now.pointers[at]) != (before.versions[at], before.pointers[at]):
                return names.path(place.trail)
        assert self._plan is not None, "a plan is made by the first look"
        differ = self._plan.whole.differ(before.whole, now.whole)
        if before.samples is not None and now.samples is not None:
            differ.update(now.samples.differ_from(before.samples))
        return names.path(self._places[min(differ)].trail) if differ else None

    def _find(self, state: Mapping[Any, object]) -> tuple[list[Any], list[int]]:
        """Return the tensors that are at the places now, None where there is none; and how many entries the state's
        optimizers have."""
        holders = self._map.resolve(state)
        found = []
        for _, holder, step in self._places:
            try:
                tensor = unwrap(step(holders[holder]))
            except _GONE:
                tensor = None
            found.append(tensor if isinstance(tensor, torch.Tensor) else None)
        return found, self._map.counts(holders)

    def _look(self, tensors: Sequence[torch.Tensor]) -> _Observation:
        if any_sharded(tensors):
            tensors = [*map(local_tensor, tensors)]
        versions = [*map(_version, tensors)]
        pointers = array(
            "Q",
            [
                t.data_ptr() if type(t) in _PLAIN_KINDS and t.layout is torch.strided else 0
                for t in tensors
            ],
        )
        if self._plan is None or self._plan.pointers != pointers:
            self._plan = _SamplingPlan.of(tensors, pointers, self._lines)
        plan = self._plan
        return _Observation(
            versions, pointers, plan.whole.digest(pointers), plan.samples.take(pointers)
        )


def _is_none(tensor: object) -> object:
    """None for None alone: a tensor is not to be compared with it."""
    return None if tensor is None else True


class _Observation(NamedTuple):
    """What was seen of the tensors of a fingerprint. An address of 0 is none."""

    versions: list[int]
    pointers: array[int]
    whole: list[int]
    samples: Samples | None


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """How tensors at these addresses are sampled."""

    pointers: array[int]
    whole: WholeDigests
    samples: SamplePlan

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], pointers: array[int], lines: int) -> _SamplingPlan:
        pieces = [
            SampledRange(place, 0, pointer, length, None)
            for place, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True))
            if pointer and tensor.is_cpu and (length := readable_bytes(tensor))
        ]
        short = [piece for piece in pieces if piece.bytes <= WHOLE_BYTES]
        long = [piece for piece in pieces if piece.bytes > WHOLE_BYTES]
        return cls(pointers, WholeDigests(short), SamplePlan(long, np.full(len(long), lines)))


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except (RuntimeError, ValueError):  # of an inference tensor, and of one that has no data yet
        return -1


_STATE = -1
"""The number of the holder that is the state itself."""


class _StateMap:
    """Where the tensors of a state are found: those of modules and optimizers, and in plain containers. Nothing of the
    user's is called."""

    def __init__(self, state: Mapping[Any, object]) -> None:
        self._holders: list[_Holder] = []
        self._optimizers: list[int] = []
        self.places: list[_TensorPath] = []
        for key, value in state.items():
            self._below(value, (None, key), _STATE, itemgetter(key), 0)

    def choose(self, count: int) -> None:
        """Keep so many places, drawn at random, and the holders that they need."""
        if len(self.places) <= count:
            return
        self.places = random.Random().sample(self.places, count)
        needed = {place.holder for place in self.places} | {*self._optimizers}
        for number in range(len(self._holders) - 1, -1, -1):
            if number in needed:
                needed.add(self._holders[number].parent)
        kept = sorted(needed - {_STATE})
        new = {_STATE: _STATE, **{number: at for at, number in enumerate(kept)}}
        holders = [self._holders[number] for number in kept]
        self._holders = [_Holder(new[parent], step) for parent, step in holders]
        self._optimizers = [new[number] for number in self._optimizers]
        self.places = [place._replace(holder=new[place.holder]) for place in self.places]

    def resolve(self, state: Mapping[Any, object]) -> list[Any]:
        """Return the holders as they are now, None where one is gone. The last one is the state."""
        found: list[Any] = [None] * len(self._holders) + [state]
        for number, (parent, step) in enumerate(self._holders):
            try:
                found[number] = unwrap(step(found[parent]))
            except _GONE:
                continue
        return found

    def counts(self, holders: Sequence[Any]) -> list[int]:
        """Return how many entries the state of each optimizer has: it grows at the first steps."""
        live = [holders[number] for number in self._optimizers]
        return [_entries(one) if isinstance(one, Optimizer) else -1 for one in live]

    def _hold(self, parent: int, step: Step) -> int:
        self._holders.append(_Holder(parent, step))
        return len(self._holders) - 1

    def _below(
        self, value: object, trail: names.Trail, parent: int, step: Step, depth: int
    ) -> None:
        value = unwrap(value)
        if isinstance(value, nn.Module):
            self._module(value, trail, self._hold(parent, step))
        elif isinstance(value, Optimizer):
            self._optimizer(value, (trail, "state"), self._hold(parent, step))
        elif isinstance(value, torch.Tensor):
            self.places.append(_TensorPath(trail, parent, step))
        elif depth <= value_codec.DEPTH_MAX and isinstance(value, Mapping):
            holder = self._hold(parent, step)
            for key, child in value.items():
                self._below(child, (trail, key), holder, itemgetter(key), depth + 1)
        elif depth <= value_codec.DEPTH_MAX and type(value) in (list, tuple):
            holder = self._hold(parent, step)
            for index, child in enumerate(value):  # type: ignore[arg-type]
                self._below(child, (trail, index), holder, itemgetter(index), depth + 1)

    def _module(self, root: nn.Module, trail: names.Trail, holder: int) -> None:
        if isinstance(root, torch.jit.ScriptModule):  # its tables are made anew at each look
            for name, _ in (*root.named_parameters(), *root.named_buffers()):
                self.places.append(_TensorPath((trail, name), holder, attrgetter(name)))
            return
        holders = {"": holder}
        for name, module in root.named_modules():
            if name:
                above, _, child = name.rpartition(".")
                # of a module that is met again under this one, the first name counts
                holders[name] = self._hold(holders[above], _child(child))
            for kind, table in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                for key, tensor in table.items():
                    if tensor is not None:
                        place = (trail, f"{name}.{key}" if name else key)
                        self.places.append(_TensorPath(place, holders[name], _entry(kind, key)))

    def _optimizer(self, live: Optimizer, trail: names.Trail, holder: int) -> None:
        self._optimizers.append(holder)
        number = 0
        for at, group in enumerate(live.param_groups):
            for index, parameter in enumerate(group["params"]):
                held = live.state.get(parameter)
                entries = held.items() if isinstance(held, dict) else ()
                tensors = [key for key, value in entries if isinstance(value, torch.Tensor)]
                if tensors:
                    holds = self._hold(holder, _state_of(at, index))
                    for key in tensors:
                        place = ((trail, number), key)
                        self.places.append(_TensorPath(place, holds, itemgetter(key)))
                number += 1


def _entries(optimizer: Optimizer) -> int:
    return sum(len(held) for held in optimizer.state.values() if isinstance(held, dict))


def _child(name: str) -> Step:
    return lambda module: module._modules[name]


def _entry(table: str, key: str) -> Step:
    return lambda module: module.__dict__[table][key]


def _state_of(group: int, index: int) -> Step:
    # defaultdict's get makes no entry
    return lambda live: live.state.get(live.param_groups[group]["params"][index])
