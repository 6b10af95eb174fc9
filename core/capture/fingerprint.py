"""A fingerprint of a live state: enough of it to tell later whether it was changed, taken in less than a millisecond.

It covers up to 256 tensors, evenly chosen: their version counters, their addresses, and, in host memory, the first
bytes of each. It remembers where they stand and not the tensors themselves: one that was replaced is seen, none is kept
alive, and none has a weak reference, with which torch refuses to swap it for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.image import codec, naming
from tierfall.core.image.item import unwrap
from tierfall.core.image.sharded import any_sharded, local_tensor
from tierfall.core.own_memory import LINE_BYTES, Memory

TENSORS_MAX = 256
_PLAIN_KINDS = (torch.Tensor, nn.Parameter)
Step = Callable[[Any], Any]
"""Goes from a thing to another in it; raises LookupError, AttributeError or TypeError where that is not there."""
_GONE = (LookupError, AttributeError, TypeError)


class Place(NamedTuple):
    """Where a tensor stands in a state: by ``steps`` from the state to its module, optimizer or container, and by
    ``last`` from there."""

    trail: naming.Trail
    steps: tuple[Step, ...]
    last: Step


class Fingerprint:
    """The fingerprint of one state. ``take`` takes it anew, ``changed`` names a tensor that differs from it."""

    def __init__(self, state: Mapping[Any, object]) -> None:
        found = [*places_of(state)]
        self._places = found[:: -(-len(found) // TENSORS_MAX) or 1]
        self._keys = tuple(state)
        self._bytes: _Bytes | None = None
        self._seen = self._look(self._tensors(state))

    def take(self, state: Mapping[Any, object]) -> bool:
        """Take it anew; False where the state has other entries by now, or a tensor is gone."""
        tensors = self._tensors(state)
        if self._keys != tuple(state) or any(tensor is None for tensor in tensors):
            return False
        self._seen = self._look(tensors)
        return True

    def changed(self, state: Mapping[Any, object]) -> str | None:
        """Name a tensor that was written to, replaced or moved since; None where none was."""
        tensors = self._tensors(state)
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor is None:
                return naming.path(place.trail)
        before, now = self._seen, self._look(tensors)
        for at, place in enumerate(self._places):
            if (now.versions[at], now.pointers[at]) != (before.versions[at], before.pointers[at]):
                return naming.path(place.trail)
        if before.bytes is not None and now.bytes is not None and self._bytes is not None:
            differs = (now.bytes != before.bytes).nonzero()
            if len(differs):
                return naming.path(self._places[self._bytes.of[int(differs[0])]].trail)
        return None

    def _tensors(self, state: Mapping[Any, object]) -> list[Any]:
        """Return the tensors that stand at the places now, None where there is none."""
        met: dict[tuple[Step, ...], Any] = {}
        found = []
        for _, steps, last in self._places:
            try:
                if steps not in met:
                    met[steps] = _go(state, steps)
                tensor = unwrap(last(met[steps]))
            except _GONE:
                tensor = None
            found.append(tensor if isinstance(tensor, torch.Tensor) else None)
        return found

    def _look(self, tensors: Sequence[Any]) -> _Seen:
        if any_sharded(tensors):
            tensors = [*map(local_tensor, tensors)]
        versions = [*map(_version, tensors)]
        pointers = [
            t.data_ptr() if type(t) in _PLAIN_KINDS and t.layout is torch.strided else 0
            for t in tensors
        ]
        if self._bytes is None or self._bytes.pointers != pointers:
            self._bytes = _Bytes.of_tensors(tensors, pointers)
        read = None
        if self._bytes.memory is not None:
            with torch.inference_mode(False):
                read = self._bytes.memory.bytes.index_select(0, self._bytes.at)
        return _Seen(versions, pointers, read)


class _Seen(NamedTuple):
    """What was seen of the tensors of a fingerprint."""

    versions: list[int]
    pointers: list[int]
    bytes: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Where the first bytes are read of tensors in host memory, and whose each is (``of``)."""

    pointers: list[int]
    memory: Memory | None
    at: torch.Tensor
    of: list[int]

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor], pointers: list[int]) -> _Bytes:
        read = [
            (place, pointer + byte)
            for place, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True))
            if pointer and tensor.is_cpu
            for byte in range(_readable(tensor))
        ]
        addresses = np.array([address for _, address in read], dtype=np.int64)
        memory = Memory(int(addresses.min()), int(addresses.max()) + 1) if read else None
        low = 0 if memory is None else memory.low
        return cls(pointers, memory, torch.from_numpy(addresses - low), [of for of, _ in read])


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except (RuntimeError, ValueError):  # of an inference tensor, and of one that has no data yet
        return -1


def _readable(tensor: torch.Tensor) -> int:
    """The bytes of a tensor that are read: of one that is not contiguous its first element."""
    if not tensor.numel():
        return 0
    return min(LINE_BYTES, tensor.nbytes if tensor.is_contiguous() else tensor.element_size())


def _go(live: Any, steps: Sequence[Step]) -> Any:
    for step in steps:
        live = unwrap(step(live))
    return live


def places_of(state: Mapping[Any, object]) -> Iterator[Place]:
    """Yield the places of a state's tensors: those of modules and optimizers, and in plain containers. Nothing of the
    user's is called."""
    for key, value in state.items():
        yield from _below(value, (None, key), (itemgetter(key),), 0)


def _below(
    value: object, trail: naming.Trail, steps: tuple[Step, ...], depth: int
) -> Iterator[Place]:
    value = unwrap(value)
    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield Place((trail, name), steps, _to_tensor(value, name, tensor))
    elif isinstance(value, Optimizer):
        yield from _below_optimizer(value, (trail, "state"), steps)
    elif isinstance(value, torch.Tensor):
        yield Place(trail, steps[:-1], steps[-1])
    elif depth <= codec.DEPTH_MAX and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _below(child, (trail, key), (*steps, itemgetter(key)), depth + 1)
    elif depth <= codec.DEPTH_MAX and type(value) in (list, tuple):
        for index, child in enumerate(value):  # type: ignore[arg-type]
            yield from _below(child, (trail, index), (*steps, itemgetter(index)), depth + 1)


def _to_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> Step:
    *parents, leaf = name.split(".")

    def step(live: Any) -> Any:
        for parent in parents:
            live = live._modules[parent]
        found = live._parameters.get(leaf)
        return live._buffers[leaf] if found is None else found

    try:
        known = step(module) is tensor
    except _GONE:  # a scripted module
        known = False
    return step if known else attrgetter(name)


def _below_optimizer(
    live: Optimizer, trail: naming.Trail, steps: tuple[Step, ...]
) -> Iterator[Place]:
    number = 0
    for at, group in enumerate(live.param_groups):
        for index, parameter in enumerate(group["params"]):
            held = live.state.get(parameter)
            for key, value in held.items() if isinstance(held, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield Place(((trail, number), key), steps, _to_state(at, index, key))
            number += 1


def _to_state(group: int, index: int, key: object) -> Step:
    def step(live: Any) -> Any:
        return live.state.get(live.param_groups[group]["params"][index])[key]

    return step
