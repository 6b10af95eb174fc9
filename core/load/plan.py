"""The state of planning a restore: the selected part, and the actions to run once the bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import KeptNode, Node, RandomNode, ValueNode, leaves
from tierfall.core.load.build import Builder
from tierfall.core.load.choices import Choices, Selection, key_names, select
from tierfall.core.load.match import TensorMatcher
from tierfall.core.load.mismatch import MismatchReport
from tierfall.core.state import modules
from tierfall.core.state.item import unwrap
from tierfall.core.state.modules import Scans
from tierfall.core.state.state_dicts import is_stateful
from tierfall.core.tensors import builtin_codecs, names, value_codec

Action = Callable[[], None]
Setter = Callable[[object], None]
"""Replaces an object of the state, where it is stored."""
_NEVER_REPORTED = (RandomNode, KeptNode)
"""A state may lack these entries of a checkpoint."""


@dataclass(slots=True)
class RestoreWork:
    """The state of planning, shared by the walks over containers, modules and optimizers.

    ``filled_parameters`` are parameters whose values are restored, so that their gradients are out of date. Below
    ``replaced_names`` nothing is left in the state that the checkpoint does not have. Actions run in the order of
    ``stages``.
    """

    state: Mapping[Any, object]
    header: ImageHeader
    choices: Choices
    selection: Selection
    report: MismatchReport
    scans: Scans
    builder: Builder = field(init=False)
    matcher: TensorMatcher = field(init=False)
    filled_parameters: list[nn.Parameter] = field(default_factory=list)
    replaced_names: list[str] = field(default_factory=list)
    assignments: list[Action] = field(default_factory=list)
    state_loads: list[Action] = field(default_factory=list)
    final_actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = Builder(self.header)
        self.matcher = TensorMatcher(self.builder, self.report, self.choices.resizes)

    @classmethod
    def begin(
        cls, header: ImageHeader, state: Mapping[Any, object], choices: Choices
    ) -> RestoreWork:
        """Check the choices against the checkpoint and the state; RestoreError for a name that occurs in neither."""
        live = (name for key, value in state.items() for name in _names_of(key, value))
        selection = select(header, choices, live)
        report = MismatchReport(choices.strict)
        return cls(state, header, choices, selection, report, modules.scan_state(state))

    def stages(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions, stage by stage."""
        filled = [*self.matcher.copies, *self.matcher.checks]
        stages = (
            filled,
            self.assignments,
            self.state_loads,
            [self._clear_gradients],
            self.final_actions,
        )
        return tuple(tuple(stage) for stage in stages)

    def _clear_gradients(self) -> None:
        for parameter in self.filled_parameters:
            parameter.grad = None

    def is_scheduled(self, optimizer: Optimizer) -> bool:
        """Return whether the state holds a learning rate scheduler of ``optimizer``."""
        parts = (part for value in self.state.values() for _, part in live_parts(value, ""))
        return any(isinstance(part, LRScheduler) and part.optimizer is optimizer for part in parts)

    # ---- names of one side only

    def absent(self, node: Node, name: str) -> None:
        """Report what is at and below a name in the checkpoint, and not in the state."""
        for leaf_name, leaf in leaves(node, name):
            is_none = isinstance(leaf, ValueNode) and self.header.values[leaf.number] is None
            ignored = is_none or isinstance(leaf, _NEVER_REPORTED)
            if self.selection.has(leaf_name) and not ignored:
                self.report.absent(leaf_name)

    def extra(self, live: Any, name: str, *, is_object: bool = False) -> None:
        """Report what is at and below a name in the state, and not in the checkpoint."""
        if unwrap(live) is None and not is_object:
            return  # None holds no state
        found = [name] if is_object else [*live_names(live, name)]
        for each in found or [name]:
            if self.selection.has(each):
                self.report.extra(each)


def _names_of(key: Any, value: object) -> Iterator[str]:
    try:
        name = names.component(key)
    except builtin_codecs.NotEncodableError:
        return
    yield name
    yield from live_names(value, name)
    yield from key_names(unwrap(value), name)


def live_names(live: Any, name: str) -> Iterator[str]:
    """Yield the names of the tensors and objects at and below a name of the state."""
    return (found for found, _ in live_parts(live, name))


def live_parts(live: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and objects at and below a name of the state, each with its name."""
    live = unwrap(live)
    if depth > value_codec.DEPTH_MAX:
        return
    if isinstance(live, nn.Module):
        scan = modules.scan(live, name)
        if scan.refused is None:
            for key, value in live.state_dict().items():
                yield f"{name}.{scan.key_name(key)}", value
    elif isinstance(live, torch.Tensor) or is_stateful(live):
        yield name, live
    elif type(live) in value_codec.MAPPINGS:
        for key, child in live.items():
            yield from live_parts(child, names.join(name, names.component(key)), depth + 1)
    elif type(live) in (list, tuple):
        for index, child in enumerate(live):
            yield from live_parts(child, f"{name}.{index}", depth + 1)
