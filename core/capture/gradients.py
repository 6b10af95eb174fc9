"""Gradients that a save leaves out: it came between a backward pass and the optimizer step that uses its gradients.

One parameter of each optimizer is looked at, by the identity of its gradient; no value is read. A gradient at a save
that was not there at the step before has not been used yet. If the next step finds that very tensor, the save has left
it out. What a loop throws away instead (after a step that a GradScaler skipped; in a GAN, what one loss leaves in the
other network) is gone by then. In a loop that sets gradients to zero in place, nothing is found.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("tierfall")

OPTIMIZERS_MAX = 8


@dataclass(slots=True)
class _Look:
    """A parameter, its gradient at its optimizer's last step, and an unused one at a save since, with the save's step.

    ``used`` is None where that is not known."""

    parameter: torch.Tensor
    used: weakref.ref[torch.Tensor] | None = None
    saved: tuple[weakref.ref[torch.Tensor], int] | None = None


class GradientWatch:
    """Told of each optimizer step before it runs, and of each save. It logs one warning at most."""

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Look] = (
            weakref.WeakKeyDictionary()
        )
        self._over = False

    def saving(self, step: int, parameters: Container[int]) -> None:
        """A state is saved as ``step``; ``parameters`` are the ids of those in it."""
        for look in list(self._looks.values()):
            gradient = look.parameter.grad
            if gradient is None or look.used is None or gradient is look.used():
                continue
            if id(look.parameter) in parameters:
                look.saved = weakref.ref(gradient), step

    def stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step, with these arguments of its ``step``."""
        look = None if self._over else self._look_at(optimizer)
        if look is None:
            return
        gradient = look.parameter.grad
        if gradient is not None and look.saved is not None and look.saved[0]() is gradient:
            self._say(look.saved[1])
        closure = len(args) > 1 or kwargs.get("closure") is not None  # it makes gradients itself
        look.used = None if gradient is None or closure else weakref.ref(gradient)
        look.saved = None

    def _look_at(self, optimizer: torch.optim.Optimizer) -> _Look | None:
        look = self._looks.get(optimizer)
        if look is None and len(self._looks) < OPTIMIZERS_MAX:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            found = next((p for p in parameters if p.grad is not None), None)
            if found is not None:
                look = self._looks[optimizer] = _Look(found)
        return look

    def _say(self, step: int) -> None:
        self._over = True
        self._looks.clear()
        logger.warning(
            "step %d was saved between a backward pass and the optimizer step that uses its gradients, which are no "
            "part of a state: a run that is restored from it makes that step without them. Save after "
            'optimizer.step(); see "Exact resume", docs/exact-resume.md',
            step,
        )
