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

from tierfall.core.tensors.dtensor import local_tensor

logger = logging.getLogger("tierfall")

OPTIMIZERS_MAX = 8
PARAMETERS_MAX = 256
"""So many of a group are looked at, to find a small one."""
BYTES_MAX = 1 << 20
"""Gradients that keep more memory alive are not watched, such as those that are views of one buffer."""


@dataclass(slots=True)
class _WatchedGradient:
    """The ``place`` of a parameter in its optimizer (group, number), its gradient at the last step, and an unused one
    at a save since, with the save's step.

    ``used`` is None where that is not known. The gradients are held until the next step, so that only small ones are
    watched; a weak reference to a tensor would keep ``torch.utils.swap_tensors`` from working on it.
    """

    place: tuple[int, int]
    used: torch.Tensor | None = None
    saved: tuple[torch.Tensor, int] | None = None


class GradientWatch:
    """Told of each optimizer step before it runs, and of each save. It logs one warning at most."""

    def __init__(self) -> None:
        self._looks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _WatchedGradient] = (
            weakref.WeakKeyDictionary()
        )
        self._over = False

    def saving(self, step: int, parameters: Container[int]) -> None:
        """A state is saved as ``step``; ``parameters`` are the ids of those in it."""
        for optimizer, look in list(self._looks.items()):
            parameter = _parameter_at(optimizer, look.place)
            gradient = _gradient_of(parameter)
            if gradient is None or look.used is None or gradient is look.used:
                continue
            if id(parameter) in parameters:
                look.saved = gradient, step

    def stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step, with these arguments of its ``step``."""
        look = None if self._over else self._record_gradient(optimizer)
        if look is None:
            return
        gradient = _gradient_of(_parameter_at(optimizer, look.place))
        if gradient is not None and look.saved is not None and look.saved[0] is gradient:
            self._warn(look.saved[1])
        closure = len(args) > 1 or kwargs.get("closure") is not None  # it makes gradients itself
        look.used = None if closure else gradient
        look.saved = None

    def _record_gradient(self, optimizer: torch.optim.Optimizer) -> _WatchedGradient | None:
        look = self._looks.get(optimizer)
        if look is None and len(self._looks) < OPTIMIZERS_MAX:
            place = _smallest(optimizer)
            if place is not None:
                look = self._looks[optimizer] = _WatchedGradient(place)
        return look

    def _warn(self, step: int) -> None:
        self._over = True
        self._looks.clear()
        logger.warning(
            "step %d was saved between a backward pass and the optimizer step that uses its gradients, which are no "
            "part of a state: a run that is restored from it makes that step without them. Save after "
            'optimizer.step(); see "Exact resume", docs/exact-resume.md',
            step,
        )


def _smallest(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """Return the place of the smallest parameter that has a gradient, of the first few."""
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
    except IndexError:  # groups were taken away
        return None
    return parameter


def _gradient_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient; None for one that is not to be kept: it holds a graph, or much memory."""
    gradient = None if parameter is None else parameter.grad
    if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
        return None
    return gradient if local_tensor(gradient).untyped_storage().nbytes() <= BYTES_MAX else None
