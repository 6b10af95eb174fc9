"""The barrier's evidence: which optimizers were seen to step since the last save, by torch's global step pre-hook.

A lazy capture is safe only if every update of what it copies is bracketed by the barrier. This module knows when a
barrier was reached; what is done there is handed in.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierfall.core.capture.gradients import GradientWatch
from tierfall.core.runtime.streams import is_recording
from tierfall.core.tensors.dtensor import is_sharded

logger = logging.getLogger("tierfall")

NOWHERE = (0, 0)
_TRAINED = attrgetter("requires_grad")


def place_of(tensor: Any) -> tuple[int, int]:
    """Return address and length in bytes of a tensor's memory; of one that several ranks hold, this rank's part."""
    with torch.no_grad():
        local = tensor.to_local() if is_sharded(tensor) else tensor
    if local.layout is not torch.strided or local.is_meta or not local.numel():
        return NOWHERE
    return local.data_ptr(), local.numel() * local.element_size()


def ignore_step(optimizer: torch.optim.Optimizer) -> None:
    """What is called after an optimizer's step where nobody times steps."""


class Barrier:
    """Calls ``reached`` before every optimizer step of this process, and remembers whose it was.

    A step that is recorded into a CUDA graph changes nothing yet, and its replays come by no hook: an optimizer with
    such a step is no evidence from then on, however often it steps without, and ``recorded`` is called. ``on_step``
    hears of each step that is not recorded, once the barrier is passed. A forked child inherits torch's table of hooks:
    there the hook does nothing, since the capture is the parent's.
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
        """How many updates of anything were seen: optimizers' steps, and those that the loop bracketed itself."""
        self.gradients = GradientWatch()
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
            self._reached()
            self.gradients.stepping(optimizer, args, kwargs)
            self._on_step(optimizer)
        except Exception:
            logger.exception("the barrier before an optimizer step failed")

    def bracketed_by_hand(self) -> None:
        """Note that the loop itself waited for the capture (``wait_captured``, ``guard``)."""
        self._bracketed = True
        self.updates += 1

    @property
    def bracketed(self) -> bool:
        """Whether the loop itself waited for the capture since ``forget``."""
        return self._bracketed

    def covered(self) -> frozenset[int]:
        """Return the ids of the parameters of the optimizers that were seen to step since ``forget``, but for frozen
        ones, which no step changes. The same object as before, where that holds the same."""
        seen = (each.param_groups for each in self._evident())
        held = [*chain.from_iterable(group["params"] for groups in seen for group in groups)]
        ids, trained = [*map(id, held)], [*map(_TRAINED, held)]
        if self._covered[:2] != (ids, trained):
            self._covered = ids, trained, frozenset(compress(ids, trained))
        return self._covered[2]

    def memory(self) -> frozenset[tuple[int, int]]:
        """Return address and length of what the optimizers change that were seen to step since ``forget``: their
        parameters, and what they keep of each. A tensor that is none of these may change at any time."""
        found: set[tuple[int, int]] = set()
        for optimizer in self._evident():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    held += [value for value in state.values() if isinstance(value, torch.Tensor)]
            found.update(map(place_of, held))
        return frozenset(found - {NOWHERE})

    @property
    def seen(self) -> bool:
        return self._bracketed or bool(self._evident())

    def _evident(self) -> list[torch.optim.Optimizer]:
        with self._lock:
            return [each for each in self._stepped if each not in self._in_graphs]

    def forget(self) -> None:
        """Begin to gather evidence anew, as each save does."""
        with self._lock:
            self._stepped.clear()
        self._bracketed = False

    def close(self) -> None:
        self._handle.remove()
