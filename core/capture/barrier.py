"""The barrier, torch's global pre-hook of optimizer steps, and its record of which optimizers stepped since a save.

A lazy capture is safe only if the barrier precedes every update of what it copies. This module detects the barrier;
the capturer supplies what happens there.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierfall.core.capture.gradients import GradientWatch
from tierfall.core.runtime.streams import SteppingStreams, is_recording

logger = logging.getLogger("tierfall")

_TRAINED = attrgetter("requires_grad")


def ignore_step(optimizer: torch.optim.Optimizer) -> None:
    """What is called after an optimizer's step where nobody times steps."""


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

    def evident_parameters(self) -> frozenset[int]:
        """The ids of the parameters of the optimizers that stepped since ``reset``, without frozen ones, which no step
        changes. If nothing changed, the same object as in the previous call."""
        stepped = (each.param_groups for each in self._evident())
        parameters = [*chain.from_iterable(g["params"] for groups in stepped for g in groups)]
        ids, trained = [*map(id, parameters)], [*map(_TRAINED, parameters)]
        if self._covered[:2] != (ids, trained):
            self._covered = ids, trained, frozenset(compress(ids, trained))
        return self._covered[2]

    def evident_tensors(
        self, *, without: Sequence[torch.optim.Optimizer] = ()
    ) -> list[torch.Tensor]:
        """The parameters of the optimizers that stepped since ``reset``, without frozen ones, and their state. Those
        of the optimizers ``without`` are left out."""
        found: list[torch.Tensor] = []
        for optimizer in self._evident():
            if any(optimizer is each for each in without):
                continue
            groups = [group["params"] for group in optimizer.param_groups]
            parameters = [*chain.from_iterable(groups)]
            if not all(groups):  # ZeRO-3 fills its groups only for the time of a step
                parameters += [each for each in optimizer.state if isinstance(each, torch.Tensor)]
            trained = [*filter(_TRAINED, parameters)]
            states = [optimizer.state.get(parameter) for parameter in trained]
            values = chain.from_iterable(s.values() for s in states if isinstance(s, dict))
            found += [*trained, *(each for each in values if isinstance(each, torch.Tensor))]
        return found

    @property
    def has_evidence(self) -> bool:
        return self._bracketed or bool(self._evident())

    def _evident(self) -> list[torch.optim.Optimizer]:
        with self._lock:
            return [each for each in self._stepped if each not in self._in_graphs]

    def reset(self) -> None:
        """Reset the record; each save does."""
        with self._lock:
            self._stepped.clear()
        self._bracketed = False

    def close(self) -> None:
        self._handle.remove()
