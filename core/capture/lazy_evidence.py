"""Which tensors of a state may be captured lazily, by evidence from the training loop.

A tensor may be captured lazily if only an optimizer's step changes it, and each step waits for the capture. There is
evidence of that for the parameters of an optimizer that stepped since the last save, for their optimizer state, and for
plain tensors in the memory of either. The user may declare it (``item(..., changes="on_step")``). It is assumed of
frozen parameters while images are compared with the state. All other tensors are copied before save() returns. Tensors
that changed during a capture, which fails that save, are no longer captured lazily; after two such saves in a row no
tensor is.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from tierfall.core.capture.barrier import Barrier, tensors_of
from tierfall.core.sampling.image_check import is_sampled
from tierfall.core.state.optimizers import is_stock
from tierfall.core.state.view import DECLARED, IN_OPTIMIZER, NO_OWNER, UNSHARED, StateView
from tierfall.core.tensors.dtensor import local_tensor
from tierfall.core.tensors.tensors import are_dense, span
from tierfall.core.tensors.wrappers import inner_tensors
from tierfall.core.types.errors import StateChangedError
from tierfall.core.types.values import Changes, CheckpointId

_PLAIN = frozenset({torch.Tensor, nn.Parameter})

logger = logging.getLogger("tierfall")
FAILURES_MAX = 2
_REMEDY = (
    "Change them only inside optimizer.step(), or call wait_captured() before the change; to keep the rest lazy, wrap "
    "what changes in tierfall.item(..., changes='anytime')"
)


def tensors_in(
    view: StateView,
    changing: Sequence[int],
    owned: Sequence[torch.Tensor],
    parameters: Collection[int],
) -> list[int]:
    """Of the tensors that may change at any time by their place in the state (``changing``), those whose memory is
    entirely in that of one tensor of ``owned``, or is a parameter's, whose id is in ``parameters``.

    ``owned`` are parameters and optimizer state, DTensors and wrappers among them. One with gaps in its memory owns
    nothing here: what is in the gaps may change at any time. So a ``state_dict()`` is captured as the module or the
    optimizer itself would be. Addresses are compared while all tensors of both sides are alive, so that none of them
    can belong to memory that was freed meanwhile.
    """
    by_address = _by_address(owned) if changing else {}
    addresses = sorted(by_address)
    return [
        number
        for number in changing
        if view.owners[number] in parameters
        or (
            view.owners[number] == NO_OWNER
            and _is_inside(view.sources[number], view.pointers[number], addresses, by_address)
        )
    ]


def _by_address(owned: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    if not set(map(type, owned)) <= _PLAIN:
        owned = [*map(local_tensor, chain.from_iterable(map(inner_tensors, owned)))]
    strided = [each for each in owned if each.layout is torch.strided]
    strided.sort(key=torch.Tensor.numel)  # of tensors that start at one address, the largest
    return dict(zip(map(torch.Tensor.data_ptr, strided), strided, strict=True))


def _is_inside(
    tensor: torch.Tensor,
    address: int,
    addresses: Sequence[int],
    by_address: Mapping[int, torch.Tensor],
) -> bool:
    at = bisect.bisect_right(addresses, address) - 1
    if not address or at < 0 or not tensor.numel():
        return False
    owner = by_address[addresses[at]]
    return (
        owner.numel() > 0
        and _end(tensor) <= _end(owner)
        and owner.device == tensor.device
        and (owner.is_contiguous() or are_dense(owner.shape, owner.stride()))
    )


def _end(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():  # the usual case, in a loop over all tensors of a state
        return tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return span(tensor)[1]


class LazyEvidence:
    """Queried by the saving thread. The capture thread calls ``on_failed`` and ``on_complete``; a thread at the barrier
    calls ``on_failed`` too, so that the next save knows. ``checked``: images are compared with the state."""

    def __init__(self, barrier: Barrier, *, checked: bool) -> None:
        self._barrier = barrier
        self._checked = checked
        self._logged: set[str] = set()
        self._changed: frozenset[str] = frozenset()
        self._frozen_change = False
        self._failures = 0
        # Attempt and step of the newest save, and of the newest one at the time of the last known failure.
        self._newest = self._newest_at_failure = (0, -1)
        self._frozen: frozenset[str] = frozenset()
        self._chosen: tuple[object, tuple[bool, ...]] | None = None
        self._has_stepped = False
        self._covered: frozenset[int] = frozenset()
        """The parameters of the optimizers that had stepped at the last ``follow_optimizers``."""
        self._changing: tuple[tuple[Changes, ...], list[int]] = ((), [])
        """A view's ``changes``, and the numbers of tensors that may change at any time."""

    def reason_to_block(self, *, elsewhere: Collection[str], first: bool) -> str | None:
        """Why nothing of this save can be captured lazily, or None.

        ``elsewhere`` are the types of devices in use, other than the host, without a copy stream.
        """
        if first:
            return "it is the first"
        if elsewhere:
            return f"part of the state is on {min(elsewhere)}, which is not captured lazily"
        if self._failures >= FAILURES_MAX:
            return (
                f"{FAILURES_MAX} saves in a row were given up, since {_few(self._changed)} changed between save() "
                f"and the next optimizer step. {_REMEDY}"
            )
        if not (self._has_stepped or self._barrier.loop_waits):
            return (
                "no optimizer step was seen since the last save. If no torch optimizer updates the state, call "
                "wait_captured() before each update, or make it within guard()"
            )
        return None

    def follow_optimizers(self, view: StateView) -> StateView:
        """A view in which tensors that only an optimizer's step changes, by their memory, are declared to do so: those
        of a ``state_dict()``, which belong to no object of the state. ``item(..., changes="anytime")`` has
        precedence."""
        stepped = self._barrier.evident_optimizers
        self._has_stepped = bool(stepped)
        covered = self._covered = self._barrier.evident_parameters(stepped)
        if self._changing[0] is not view.changes:
            numbers = [n for n, each in enumerate(view.changes) if each is Changes.ANYTIME]
            self._changing = view.changes, numbers
        # All tensors of a known optimizer have owners in the view: their memory needs no comparison.
        known = view.optimizers if covered <= view.parameters.keys() else ()
        ids = {*map(id, filter(is_stock, known))}
        elsewhere = tensors_of([each for each in stepped if id(each) not in ids])
        owned = tensors_in(view, self._changing[1], elsewhere, covered)
        if not owned:
            return view
        changes, owners = [*view.changes], [*view.owners]
        for number in owned:
            changes[number], owners[number] = Changes.ON_STEP, IN_OPTIMIZER
        return replace(view, changes=tuple(changes), owners=tuple(owners))

    def choose(self, view: StateView) -> tuple[bool, ...]:
        """For each tensor of the view that ``follow_optimizers`` returned last, whether it may be captured lazily, by
        the evidence since ``reset``."""
        covered = self._covered
        untrained: set[int] = set()
        if not view.parameters.keys() <= covered:
            live = (each for each in view.live_parameters if each is not None)
            untrained = {id(each) for each in live if not each.requires_grad} - covered
        self._frozen = frozenset(map(view.parameters.__getitem__, untrained))
        frozen = untrained if self._checked and not self._frozen_change else frozenset()
        # A loop that itself waits for the capture before its changes does so for all tensors.
        bracketed = self._barrier.loop_waits
        state = (view.structure, view.plain, view.changes, view.owners)
        key = (*state, covered, frozen, bracketed, self._changed)
        if self._chosen is None or self._chosen[0] != key:
            trusted = None if bracketed else covered | frozen | {DECLARED, UNSHARED, IN_OPTIMIZER}
            self._chosen = (key, self._choose(view, trusted))
            if trusted is not None:
                # Tensors that the user wrapped in item() have no parameter as their owner.
                owners = ({*view.owners} & view.parameters.keys()) - covered - untrained
                self._log_unseen([view.parameters[owner] for owner in owners])
        return self._chosen[1]

    def _log_unseen(self, names: Collection[str]) -> None:
        if names:
            self.warn_once(
                f"copied before save() returns, which takes longer: {_few(names)}; no torch optimizer was seen to "
                f"step {'it' if len(names) == 1 else 'them'} since the last save. What changes only after the barrier "
                "may be wrapped in tierfall.item(..., changes='on_step')"
            )

    def _choose(self, view: StateView, trusted: Collection[int] | None) -> tuple[bool, ...]:
        columns = zip(view.names, view.changes, view.owners, strict=True)
        return tuple(
            changes is Changes.ON_STEP
            and (trusted is None or owner in trusted)
            and name not in self._changed
            and (not self._checked or is_sampled(view, index))
            for index, (name, changes, owner) in enumerate(columns)
        )

    def reset(self) -> None:
        """Reset the evidence; each save does."""
        self._barrier.reset()

    def warn_once(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)

    # Outcomes of lazy saves ------------------------------------------------------------------------

    def on_begun(self, id: CheckpointId) -> None:
        """A lazily captured save has begun."""
        self._newest = (id.attempt, id.step)

    def on_failed(self, id: CheckpointId, error: BaseException) -> None:
        """A lazily captured save was given up; may be called repeatedly for one save. A save that began before the
        failure of another was known does not count, since no tensor had been excluded yet."""
        if not isinstance(error, StateChangedError):
            return
        if (id.attempt, id.step) > self._newest_at_failure:
            self._failures += 1
        self._newest_at_failure = self._newest
        changed = frozenset(error.tensors) - self._changed
        self._changed |= changed
        if changed & self._frozen:
            self._frozen_change = True
        if changed and self._failures < FAILURES_MAX:
            frozen = " and every other frozen parameter" if changed & self._frozen else ""
            logger.warning(
                "from now on save() copies %s%s before it returns, since the training loop made changes there between "
                "save() and the next optimizer step. %s",
                _few(changed),
                frozen,
                _REMEDY,
            )

    def on_complete(self) -> None:
        """A lazily captured save is complete."""
        self._failures = 0


def _few(names: Collection[str]) -> str:
    first = min(names, default="tensors")
    return first if len(names) < 2 else f"{first} and {len(names) - 1} more"
