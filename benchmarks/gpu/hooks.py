"""How long the step hooks of one Checkpointer take: on the host, and in the order of the caller's work on a device."""

from __future__ import annotations

import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from benchmarks.gpu.accelerator import Accelerator


class HookClock:
    """Times whatever hooks are registered between its making and ``end_here``: torch runs them in that order.

    What is told is of the last optimizer step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._began = 0.0
        self._first: Any = None
        self._last: Any = None
        self.host_s = 0.0
        self._handles: list[RemovableHandle] = [register_optimizer_step_pre_hook(self._begin)]

    def end_here(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._end))

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._first = self._accelerator.mark()
        self._began = time.perf_counter()

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.host_s = time.perf_counter() - self._began
        self._last = self._accelerator.mark()

    def device_s(self) -> float:
        """Return how long the device's further work was held up; blocks until it has come there."""
        return self._accelerator.seconds(self._first, self._last)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
