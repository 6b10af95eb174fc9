"""Fingerprints of a live state, to detect later whether it has changed.

A fingerprint has the version counters and addresses of tensors, and samples of those in host memory. It covers all
tensors if that takes at most STEP_SHARE of a training step, otherwise a random choice of at least TENSORS_MIN; the rest
of that time is used for more samples per tensor. It records how to find tensors, without references to them: so a
replaced tensor is detected, none is kept alive, and none has a weak reference, which would make torch refuse to swap
it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.sampling.lines import LINES_MAX, SamplePlan, Samples
from tierfall.core.sampling.ranges import LINE_BYTES, WHOLE_LINES, SampledRange
from tierfall.core.state.item import unwrap
from tierfall.core.tensors import names, value_codec
from tierfall.core.tensors.dtensor import LocalBlocks, any_sharded, local_tensor
from tierfall.core.tensors.tensors import readable_bytes
from tierfall.core.tensors.wrappers import inner_tensors

TENSORS_MIN = 64
TENSOR_S = 2e-6
"""Estimated time per tensor."""
STEP_SHARE = 0.001
"""Fraction of a training step that a fingerprint may take."""
LEAST_S = 1e-4
"""Time that a fingerprint may take regardless of the step's duration."""
LINE_S = 5e-8
"""Estimated time per cache line."""
LINES_MIN = 9
"""Minimum of cache lines per tensor: the first, the last, and others between."""
_PLAIN_KINDS = (torch.Tensor, nn.Parameter)
Step = Callable[[Any], Any]
"""Gets an element of an object; raises LookupError, AttributeError or TypeError if there is none."""
_MISSING = (LookupError, AttributeError, TypeError)


class _Holder(NamedTuple):
    """A container of tensors or of other holders: reached by ``step`` from holder number ``parent``."""

    parent: int
    step: Step


class _TensorPath(NamedTuple):
    """How to reach a tensor: by ``step`` from holder number ``holder``."""

    trail: names.Trail
    holder: int
    step: Step


class Fingerprint:
    """The fingerprint of one state. ``refresh`` renews it, ``changed`` compares the state with it."""

    def __init__(self, state: Mapping[Any, object], step_s: float | None = None) -> None:
        """``step_s`` is the duration of a training step."""
        self._map = _StateMap(state)
        budget_s = max(LEAST_S, STEP_SHARE * (step_s or 0.0))
        self._map.choose(max(TENSORS_MIN, int(budget_s / TENSOR_S)))
        self._paths = self._map.paths
        tensor_s = budget_s / max(1, len(self._paths)) - TENSOR_S
        self._lines = min(LINES_MAX, max(LINES_MIN, int(tensor_s / LINE_S)))
        self._keys = tuple(state)
        self._plan: tuple[array[int], SamplePlan] | None = None
        """What was sampled of tensors at these addresses."""
        found, self._counts = self._find(state)
        self._observed = self._observe(found)

    def refresh(self, state: Mapping[Any, object]) -> bool:
        """Renew the fingerprint; False if the state has other entries now, or a tensor is missing."""
        found, counts = self._find(state)
        if (
            self._keys != tuple(state)
            or counts != self._counts
            or any(each is None for each in found)
        ):
            return False
        self._observed = self._observe(found)
        return True

    def changed(self, state: Mapping[Any, object]) -> str | None:
        """The path of a tensor that was written to, replaced or moved since; None if there is none."""
        found, _ = self._find(state)
        for path, tensor in zip(self._paths, found, strict=True):
            if tensor is None:
                return names.path(path.trail)
        before, now = self._observed, self._observe(found)
        for at, path in enumerate(self._paths):
            if (now.versions[at], now.pointers[at]) != (before.versions[at], before.pointers[at]):
                return names.path(path.trail)
        if before.samples is None or now.samples is None:
            return None
        differ = now.samples.differ_from(before.samples)
        return names.path(self._paths[differ[0]].trail) if differ else None

    def _find(self, state: Mapping[Any, object]) -> tuple[list[Any], list[int]]:
        """The tensors at the paths now, None for a missing one, and the number of entries of each optimizer's state."""
        holders = self._map.resolve(state)
        found = []
        for _, holder, step in self._paths:
            try:
                tensor = unwrap(step(holders[holder]))
            except _MISSING:
                tensor = None
            found.append(tensor if isinstance(tensor, torch.Tensor) else None)
        return found, self._map.counts(holders)

    def _observe(self, tensors: Sequence[torch.Tensor]) -> _Observation:
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
        if self._plan is None or self._plan[0] != pointers:
            self._plan = pointers, _plan_samples(tensors, pointers, self._lines)
        return _Observation(versions, pointers, self._plan[1].read(pointers))


class _Observation(NamedTuple):
    """Properties of a fingerprint's tensors at one time. An address of 0 means none."""

    versions: list[int]
    pointers: array[int]
    samples: Samples | None


def _plan_samples(tensors: Sequence[torch.Tensor], pointers: array[int], lines: int) -> SamplePlan:
    """What is sampled of tensors at these addresses: short ones whole, and so many lines of each other."""
    ranges = [
        SampledRange(number, 0, pointer, length, None)
        for number, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True))
        if pointer and tensor.is_cpu and (length := readable_bytes(tensor))
    ]
    is_short = np.array([each.bytes <= WHOLE_LINES * LINE_BYTES for each in ranges], dtype=bool)
    return SamplePlan(ranges, np.where(is_short, WHOLE_LINES, lines))


def _version(tensor: torch.Tensor) -> int:
    try:
        if type(tensor) in _PLAIN_KINDS:
            return tensor._version
        return sum(each._version for each in inner_tensors(tensor))
    except (RuntimeError, ValueError):  # an inference tensor, or one without data yet
        return -1


_STATE = -1
"""The number of the holder that is the state itself."""


class _StateMap:
    """The paths of a state's tensors: those of modules and optimizers, and in plain containers. Calls no user code."""

    def __init__(self, state: Mapping[Any, object]) -> None:
        self._holders: list[_Holder] = []
        self._optimizers: list[int] = []
        self.paths: list[_TensorPath] = []
        for key, value in state.items():
            self._below(value, (None, key), _STATE, itemgetter(key), 0)

    def choose(self, count: int) -> None:
        """Keep ``count`` random paths, and the holders that they need."""
        if len(self.paths) <= count:
            return
        self.paths = random.Random().sample(self.paths, count)
        needed = {path.holder for path in self.paths} | {*self._optimizers}
        for number in range(len(self._holders) - 1, -1, -1):
            if number in needed:
                needed.add(self._holders[number].parent)
        kept = sorted(needed - {_STATE})
        new = {_STATE: _STATE, **{number: at for at, number in enumerate(kept)}}
        holders = [self._holders[number] for number in kept]
        self._holders = [_Holder(new[parent], step) for parent, step in holders]
        self._optimizers = [new[number] for number in self._optimizers]
        self.paths = [path._replace(holder=new[path.holder]) for path in self.paths]

    def resolve(self, state: Mapping[Any, object]) -> list[Any]:
        """The holders as they are now, None for a missing one. The last one is the state."""
        found: list[Any] = [None] * len(self._holders) + [state]
        for number, (parent, step) in enumerate(self._holders):
            try:
                found[number] = unwrap(step(found[parent]))
            except _MISSING:
                continue
        return found

    def counts(self, holders: Sequence[Any]) -> list[int]:
        """The number of entries of each optimizer's state, which grows in the first steps."""
        live = [holders[number] for number in self._optimizers]
        return [_entries(each) if isinstance(each, Optimizer) else -1 for each in live]

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
            self.paths.append(_TensorPath(trail, parent, step))
        elif isinstance(value, LocalBlocks):
            holder = self._hold(parent, step)
            for index in range(len(value.parts)):
                self.paths.append(_TensorPath(trail, holder, _part(index)))
        elif depth <= value_codec.DEPTH_MAX and isinstance(value, Mapping):
            holder = self._hold(parent, step)
            for key, child in value.items():
                self._below(child, (trail, key), holder, itemgetter(key), depth + 1)
        elif depth <= value_codec.DEPTH_MAX and type(value) in (list, tuple):
            holder = self._hold(parent, step)
            for index, child in enumerate(value):  # type: ignore[arg-type]
                self._below(child, (trail, index), holder, itemgetter(index), depth + 1)

    def _module(self, root: nn.Module, trail: names.Trail, holder: int) -> None:
        if isinstance(root, torch.jit.ScriptModule):  # its tables are new objects at each access
            for name, _ in (*root.named_parameters(), *root.named_buffers()):
                self.paths.append(_TensorPath((trail, name), holder, attrgetter(name)))
            return
        holders = {"": holder}
        for name, module in root.named_modules():
            if name:
                above, _, child = name.rpartition(".")
                # named_modules yields a shared module once, under its first name
                holders[name] = self._hold(holders[above], _child(child))
            for kind, table in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                for key, tensor in table.items():
                    if tensor is not None:
                        below = (trail, f"{name}.{key}" if name else key)
                        self.paths.append(_TensorPath(below, holders[name], _entry(kind, key)))

    def _optimizer(self, live: Optimizer, trail: names.Trail, holder: int) -> None:
        self._optimizers.append(holder)
        number = 0
        for at, group in enumerate(live.param_groups):
            for index, parameter in enumerate(group["params"]):
                state = live.state.get(parameter)
                entries = state.items() if isinstance(state, dict) else ()
                keys = [key for key, value in entries if isinstance(value, torch.Tensor)]
                if keys:
                    parent = self._hold(holder, _state_of(at, index))
                    for key in keys:
                        below = ((trail, number), key)
                        self.paths.append(_TensorPath(below, parent, itemgetter(key)))
                number += 1


def _entries(optimizer: Optimizer) -> int:
    return sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))


def _part(index: int) -> Step:
    return lambda blocks: blocks.parts[index][0]


def _child(name: str) -> Step:
    return lambda module: module._modules[name]


def _entry(table: str, key: str) -> Step:
    return lambda module: module.__dict__[table][key]


def _state_of(group: int, index: int) -> Step:
    # ``get`` of a defaultdict adds no entry
    return lambda live: live.state.get(live.param_groups[group]["params"][index])
