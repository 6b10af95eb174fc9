"""Detection of saves between a backward pass and the optimizer step that uses its gradients, which a save omits.

One parameter per optimizer is watched, by the identity of its gradient; no value is read. A gradient at a save that
differs from that at the previous step is unused so far. If the next step uses that same tensor, the save has omitted
it. A gradient that the loop discards instead (after a step that a GradScaler skipped; in a GAN, that of the other
network) is gone by then. In a loop that zeroes gradients in place, nothing is detected.
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
"""Parameters per group that are examined to find a small one."""
BYTES_MAX = 1 << 20
"""Gradients whose storage is larger are not watched, such as views of one buffer."""


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
    """Called before each optimizer step, and at each save. Logs at most one warning."""

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
