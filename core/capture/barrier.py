"""When training is about to change or free what a capture copies: the barrier, torch's global pre-hook of optimizer
steps, with its record of which optimizers stepped since a save; and the watch of storages that are freed in place.

A lazy capture is safe only if the barrier precedes every update of what it copies. The capturer supplies what happens
there.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierfall.core.runtime.streams import SteppingStreams, is_recording
from tierfall.core.tensors.dtensor import local_tensor

logger = logging.getLogger("tierfall")

OPTIMIZERS_MAX = 8
PARAMETERS_MAX = 256
"""Parameters per group that are examined to find a small one."""
BYTES_MAX = 1 << 20
"""Gradients whose storage is larger are not watched, such as views of one buffer."""

_TRAINED = attrgetter("requires_grad")


@dataclass(slots=True)
class _WatchedGradient:
    """The ``place`` of a parameter in its optimizer (group, number), its gradient at the previous step (``used``, None:
    unknown), and an unused gradient at a save since then, with the save's step.

    Gradients are kept alive until the next step, so only small ones are watched. A weak reference to a tensor would
    make ``torch.utils.swap_tensors`` fail on it.
    """

    place: tuple[int, int]
    used: torch.Tensor | None = None
    saved: tuple[torch.Tensor, int] | None = None


class GradientWatch:
    """Detects saves between a backward pass and the optimizer step that uses its gradients: a save omits these. Called
    before each optimizer step, and at each save. Logs at most one warning.

    One parameter per optimizer is watched, by the identity of its gradient; no value is read. A gradient at a save that
    differs from that at the previous step is unused so far. If the next step uses that same tensor, the save has
    omitted it. A gradient that the loop discards instead (after a step that a GradScaler skipped; in a GAN, that of the
    other network) is gone by then. In a loop that zeroes gradients in place, nothing is detected.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _WatchedGradient] = (
            weakref.WeakKeyDictionary()
        )
        self._has_warned = False

    def on_save(self, step: int, parameters: Container[int]) -> None:
        """A state is saved as ``step``; ``parameters`` are the ids of its parameters."""
        for optimizer, watched in list(self._watched.items()):
            parameter = _parameter_at(optimizer, watched.place)
            gradient = _gradient_of(parameter)
            if gradient is None or watched.used is None or gradient is watched.used:
                continue
            if id(parameter) in parameters:
                watched.saved = gradient, step

    def on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step, with these arguments of its ``step``."""
        watched = None if self._has_warned else self._watch(optimizer)
        if watched is None:
            return
        gradient = _gradient_of(_parameter_at(optimizer, watched.place))
        if gradient is not None and watched.saved is not None and watched.saved[0] is gradient:
            self._warn(watched.saved[1])
        closure = len(args) > 1 or kwargs.get("closure") is not None  # computes gradients itself
        watched.used = None if closure else gradient
        watched.saved = None

    def _watch(self, optimizer: torch.optim.Optimizer) -> _WatchedGradient | None:
        watched = self._watched.get(optimizer)
        if watched is None and len(self._watched) < OPTIMIZERS_MAX:
            place = _smallest(optimizer)
            if place is not None:
                watched = self._watched[optimizer] = _WatchedGradient(place)
        return watched

    def _warn(self, step: int) -> None:
        self._has_warned = True
        self._watched.clear()
        logger.warning(
            "step %d was saved between a backward pass and the optimizer step that uses its gradients, which are no "
            "part of a state: a run that is restored from it makes that step without them. Save after "
            'optimizer.step(); see "Exact resume", docs/exact-resume.md',
            step,
        )


def _smallest(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """The place of the smallest parameter with a gradient, among the first PARAMETERS_MAX of each group."""
    sizes = {
        (group, number): parameter.numel()
        for group, each in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(each["params"][:PARAMETERS_MAX])
        if _gradient_of(parameter) is not None
    }
    return min(sizes, key=sizes.__getitem__, default=None)


def _parameter_at(optimizer: torch.optim.Optimizer, place: tuple[int, int]) -> torch.Tensor | None:
    group, number = place
    try:
        parameter: torch.Tensor = optimizer.param_groups[group]["params"][number]
    except IndexError:  # groups were removed
        return None
    return parameter


def _gradient_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter's gradient; None for one that must not be kept alive, as it has a graph or much memory."""
    gradient = None if parameter is None else parameter.grad
    if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
        return None
    return gradient if local_tensor(gradient).untyped_storage().nbytes() <= BYTES_MAX else None


def ignore_step(optimizer: torch.optim.Optimizer) -> None:
    """The default of ``on_step``, before each step: nobody times steps."""


def tensors_of(stepped: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The parameters of these optimizers, without frozen ones, and their state."""
    found: list[torch.Tensor] = []
    for optimizer in stepped:
        groups = [group["params"] for group in optimizer.param_groups]
        parameters = [*chain.from_iterable(groups)]
        if not all(groups):  # ZeRO-3 fills its groups only for the time of a step
            parameters += [each for each in optimizer.state if isinstance(each, torch.Tensor)]
        trained = [*filter(_TRAINED, parameters)]
        states = [optimizer.state.get(parameter) for parameter in trained]
        values = chain.from_iterable(s.values() for s in states if isinstance(s, dict))
        found += [*trained, *(each for each in values if isinstance(each, torch.Tensor))]
    return found


class Barrier:
    """Calls ``reached`` before every optimizer step of this process, and records the optimizer.

    A step that is recorded into a CUDA graph changes nothing yet, and its replays run without hooks. So an optimizer
    with such a step never counts as evidence again, and ``recorded`` is called. ``on_step`` is called with the
    optimizer of each other step, after the barrier. In a forked child, which inherits torch's hooks, the hook does
    nothing, since the capture is the parent's.
    """

    def __init__(
        self,
        reached: Callable[[], None],
        *,
        recorded: Callable[[], None],
        on_step: Callable[[torch.optim.Optimizer], None] = ignore_step,
    ) -> None:
        self._reached = reached
        self._pid = os.getpid()
        self._on_step = on_step
        self._recorded = recorded
        self._lock = threading.Lock()  # optimizers may step on other threads while one saves
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_graphs: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._bracketed = False
        self._covered: tuple[list[int], list[bool], frozenset[int]] = ([], [], frozenset())
        self.updates = 0
        """The number of updates: optimizer steps, and updates for which the loop itself waited."""
        self.gradients = GradientWatch()
        self.streams = SteppingStreams()
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook. ``torch.compile`` of a step must not trace what it calls: that would compile this package."""
        traced = set_eval_frame(None)
        try:
            self._at_step(optimizer, args, kwargs)
        finally:
            set_eval_frame(traced)

    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is the hook inlined

    def _at_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return
        if is_recording():
            self._in_graphs.add(optimizer)
            self._recorded()
            return
        with self._lock:
            self._stepped.add(optimizer)
        self.updates += 1
        try:
            self.streams.note()
            self._reached()
            self.gradients.on_step(optimizer, args, kwargs)
            self._on_step(optimizer)
        except Exception:
            logger.exception("the barrier before an optimizer step failed")

    def on_explicit_wait(self) -> None:
        """Record that the loop itself waited for the capture (``wait_captured``, ``guard``)."""
        self._bracketed = True
        self.updates += 1

    @property
    def loop_waits(self) -> bool:
        """Whether the loop itself waited for the capture since ``reset``."""
        return self._bracketed

    def evident_parameters(self, stepped: Sequence[torch.optim.Optimizer]) -> frozenset[int]:
        """The ids of the parameters of these optimizers, without frozen ones, which no step changes. If nothing
        changed, the same object as in the previous call."""
        groups = chain.from_iterable(each.param_groups for each in stepped)
        parameters = [*chain.from_iterable(group["params"] for group in groups)]
        ids, trained = [*map(id, parameters)], [*map(_TRAINED, parameters)]
        if self._covered[:2] != (ids, trained):
            self._covered = ids, trained, frozenset(compress(ids, trained))
        return self._covered[2]

    @property
    def evident_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped since ``reset``."""
        with self._lock:
            stepped = [*self._stepped]
        return [each for each in stepped if each not in self._in_graphs] if stepped else []

    def reset(self) -> None:
        """Reset the record; each save does."""
        with self._lock:
            self._stepped.clear()
        self._bracketed = False

    def close(self) -> None:
        self._handle.remove()


METHODS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


class StorageWatch:
    """Until ``close``, calls ``before`` with address and length in bytes of a storage's memory, on the thread that is
    about to free it.

    ``storage.resize_(0)``, and sending a tensor to another process by shared memory, free a storage's memory although
    the tensor still exists. torch has no hook for them, so these methods of ``torch.UntypedStorage`` are wrapped."""

    def __init__(self, before: Callable[[int, int], None]) -> None:
        self._before = before
        self._pid = os.getpid()
        _watches.append(self)
        if len(_watches) == 1:
            _wrap()

    def reached(self, storage: torch.UntypedStorage) -> None:
        # A forked child frees memory of its own; a fake or meta tensor has none.
        if os.getpid() == self._pid and storage.nbytes() and _has_memory(storage):
            self._before(storage.data_ptr(), storage.nbytes())

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self in _watches:
            _watches.remove(self)
            if not _watches:
                _unwrap()


def _has_memory(storage: torch.UntypedStorage) -> bool:
    return storage.device.type != "meta" and getattr(storage, "_fake_device", None) is None


_watches: list[StorageWatch] = []
_wrapped: dict[str, tuple[Any, Any]] = {}
"""By method name: the previous entry of the class's own namespace, or None, and the wrapper."""


def _wrap() -> None:
    for name in METHODS:
        original = getattr(torch.UntypedStorage, name, None)
        if original is not None:
            before, now = torch.UntypedStorage.__dict__.get(name), _wrapper_of(original)
            _wrapped[name] = (before, now)
            setattr(torch.UntypedStorage, name, now)


def _unwrap() -> None:
    """Restore the methods, except those that other code has replaced meanwhile."""
    for name, (before, now) in _wrapped.items():
        if torch.UntypedStorage.__dict__.get(name) is not now:
            continue
        if before is None:
            delattr(torch.UntypedStorage, name)
        else:
            setattr(torch.UntypedStorage, name, before)
    _wrapped.clear()


def _wrapper_of(original: Any) -> Any:
    @functools.wraps(original)
    def method(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        for watch in tuple(_watches):
            try:
                watch.reached(storage)
            except Exception:
                logger.exception("the wait before a storage is freed failed")
        return original(storage, *args, **kwargs)

    return method
