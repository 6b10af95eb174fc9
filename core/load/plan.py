"""The state of planning a restore: the selected part, and the actions to run once the bytes are read."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    CONTAINERS,
    CodecNode,
    KeptNode,
    Node,
    OptimizerNode,
    QuantizedNode,
    RandomNode,
    TensorNode,
    ValueNode,
    leaves,
)
from tierfall.core.load.build import BlockTarget, Builder
from tierfall.core.load.choices import Choices, check_names, key_names
from tierfall.core.load.match import SharedMemory, TensorMatcher, kept_by_skip, part_of
from tierfall.core.load.mismatch import MismatchReport
from tierfall.core.state import modules
from tierfall.core.state.item import unwrap, visit_state
from tierfall.core.state.state_dicts import is_stateful, type_name
from tierfall.core.tensors import builtin_codecs, names, numpy_values
from tierfall.core.tensors.dtensor import LocalBlocks, NotOneBlockError, as_dtensor_like
from tierfall.core.tensors.tensors import AddressRange
from tierfall.core.types.errors import RestoreError

Action = Callable[[], None]
Setter = Callable[[object], None]
"""Replaces an object of the state, where it is stored."""
_OPENED = CONTAINERS - {OptimizerNode}
_NEVER_REPORTED = (RandomNode, KeptNode)
"""A state may lack these entries of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The reads of a restore or a load; ``finish`` is called once all are done.

    ``targets`` are what is read. ``shared`` are read ahead and checked. ``in_place`` returns the names of the state's
    tensors that are read into directly, by their memory. Below ``replaced_names`` nothing is left in the state that the
    checkpoint does not have.
    """

    targets: tuple[BlockTarget, ...]
    actions: tuple[Action, ...]
    shared: tuple[SharedMemory, ...] = ()
    in_place: Callable[[], dict[AddressRange, str]] = dict
    replaced_names: tuple[str, ...] = ()
    loaded: dict[Any, Any] = field(default_factory=dict)
    """Of a load: the nested dict, with tensors on the chosen device and values as they were saved."""

    def finish(self) -> None:
        """Run the actions that need the bytes: copy into tensors without a flat view, assign values, call
        load_state_dict of other objects in the order of the state, and set the random state last."""
        for action in self.actions:
            action()

    def replaces(self, name: str) -> bool:
        """Return whether a name that the checkpoint lacks is removed from the state."""
        return any(names.is_within(name, replaced) for replaced in self.replaced_names)


class RestoreWork:
    """The state of planning, shared by the walks over containers, modules and optimizers.

    ``positions`` has the stored tensor of each name in the checkpoint. ``filled_parameters`` are parameters whose
    values are restored, so that their gradients are out of date. ``replaced_names`` as in ``ReadPlan``.
    """

    def __init__(self, header: ImageHeader, state: Mapping[Any, object], choices: Choices) -> None:
        """Check the choices against the checkpoint and the state; RestoreError for a name that occurs in neither."""
        live = (name for key, value in state.items() for name in _names_of(key, value))
        check_names(header, choices, live)
        self.state, self.header, self.choices = state, header, choices
        self.report = MismatchReport(choices.strict, choices.rename, given=choices.is_any_given)
        self.scans = modules.scan_state(state)
        self.builder = Builder(header)
        named = leaves(header.tree, "")
        self.positions = {n: leaf.position for n, leaf in named if isinstance(leaf, TensorNode)}
        self.matcher = TensorMatcher(self.builder, self.report, choices.resizes)
        self.filled_parameters: list[nn.Parameter] = []
        self.replaced_names: list[str] = []
        self.assignments: list[Action] = []
        self.state_loads: list[Action] = []
        self.final_actions: list[Action] = []
        self._objects: dict[int, tuple[object, str, object]] = {}
        self._absent: list[tuple[str, list[tuple[str, Node]]]] = []
        self._extra: list[tuple[str, list[tuple[str, Any]]]] = []

    def actions(self) -> tuple[Action, ...]:
        """Return the actions in the order in which they run."""
        return (
            *self.matcher.copies,
            *self.assignments,
            *self.state_loads,
            self._clear_gradients,
            *self.final_actions,
        )

    def _clear_gradients(self) -> None:
        for parameter in self.filled_parameters:
            parameter.grad = None

    def is_scheduled(self, optimizer: Optimizer) -> bool:
        """Return whether the state holds a learning rate scheduler of ``optimizer``."""
        parts = (part for value in self.state.values() for _, part in visit_state(value))
        return any(isinstance(part, LRScheduler) and part.optimizer is optimizer for part in parts)

    def block_like(
        self, position: int, live: Any, device: torch.device, name: str
    ) -> torch.Tensor | None:
        """Return a new tensor, sharded as ``live``, whose part of this rank is read of a merged image; None, once
        reported, where the rank has no single part."""
        dtype = self.header.tensors[position].dtype
        try:
            local, offset = part_of(live)
        except NotOneBlockError as error:
            self.report.refuses(name, f"cannot be restored: {error}")
            return None
        flat = torch.empty(local.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
        self.builder.targets.append(
            BlockTarget(position=position, target=flat, offset=offset, lengths=tuple(local.shape))
        )
        return as_dtensor_like(live, flat.view(dtype).view(local.shape))

    # ---- names

    def stored_aliases(self, name: str) -> list[str]:
        """Return all names of a tensor in the checkpoint, by one of them."""
        at = self.positions.get(name)
        return [name] if at is None else self._aliases[at]

    @cached_property
    def _aliases(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for each, position in self.positions.items():
            found.setdefault(position, []).append(each)
        return found

    @cached_property
    def names_of(self) -> dict[int, list[str]]:
        """All names of a parameter in the modules of the state, by its id."""
        found: dict[int, list[str]] = {}
        for scan in self.scans.by_module.values():
            for name, each in scan.named_parameters():
                found.setdefault(id(each), []).append(name)
        return found

    def note_object(self, live: object, name: str, content: object) -> None:
        """Report an object that is set to other content under another name already."""
        _, first, known = self._objects.setdefault(id(live), (live, name, content))
        if known != content and self.report.strict:
            self.report.refuses(
                name,
                f"is the same object as {first} in the state, and the checkpoint has other values for it: give each "
                "name an object of its own, or restore one with only=[...]",
            )

    def absent(self, node: Node, name: str) -> None:
        """Note what is at and below a name in the checkpoint, and not in the state."""
        found = [e for e in leaves(node, name, _OPENED) if not self._is_nothing(e[1])]
        self._absent += [(name, found)] if found else []

    def extra(self, live: Any, name: str, *, is_object: bool = False) -> None:
        """Note what is at and below a name in the state, and not in the checkpoint."""
        if is_object or unwrap(live) is not None:  # None holds no state
            found = [] if is_object else [*live_parts(live, name)]
            self._extra.append((name, found or [(name, live)]))

    def _is_nothing(self, leaf: Node) -> bool:
        is_none = isinstance(leaf, ValueNode) and self.header.values[leaf.number] is None
        return is_none or isinstance(leaf, _NEVER_REPORTED)

    def report_kept(self) -> None:
        """Report skipped entries that the restore of another name would change."""
        live = live_parts(dict(self.state), "") if self.choices.skip else ()
        kept = [each for each in live if self.choices.skipped(each[0])]
        self.matcher.check_kept(kept)
        for name, part in kept:
            if id(part) in self._objects:
                _, other, _ = self._objects[id(part)]
                self.report.refuses(name, kept_by_skip("object", other))

    def report_names(self) -> None:
        """Report the names that only one side has, once it is known which memory is filled: a name whose bytes, or
        whose memory, another name restores is no mismatch."""
        for name, stored in self._absent:
            missing = [
                each
                for each, leaf in stored
                if self.choices.selects_at_or_below(each) and not self.matcher.has_filled(leaf)
            ]
            contents = {each: self._content(leaf, each) for each, leaf in stored}
            for each, content in _whole_or_parts(name, contents, missing):
                self.report.absent(each, content)
        lacking = list[str]()
        for name, live in self._extra:
            kept = [
                each
                for each, part in live
                if self.choices.has(each) and not self.matcher.has_memory(part)
            ]
            contents = {each: _live_content(part) for each, part in live}
            for each, content in _whole_or_parts(name, contents, kept):
                self.report.extra(each, content)
            parts = dict(live)
            lacking += [n for n in kept if isinstance(parts[n], torch.Tensor | LocalBlocks)]
        if lacking and not (self.choices.strict or self.matcher.fills_any):
            self._refuse_if_none_fits(lacking[0])

    def _refuse_if_none_fits(self, lacking: str) -> None:
        """Refuse a restore that fills no tensor, though the checkpoint has some under names that the state lacks:
        training would go on from the values that ``lacking`` and the others have now."""
        stored = [
            name
            for name, found in self._absent
            for _, leaf in found
            if isinstance(leaf, TensorNode)
        ]
        if stored:
            self.report.refuses(
                lacking,
                "is not in the checkpoint, nor is any other tensor of the state, so that none would be restored; "
                f"rename={{{stored[0]!r}: ...}} restores the checkpoint's under the state's name",
            )

    def _content(self, leaf: Node, name: str) -> object:
        match leaf:
            case TensorNode() | QuantizedNode():
                stored = self.header.tensors[leaf.position]
                return stored.dtype, stored.whole_shape
            case ValueNode() | CodecNode():
                return None
        return self.header.types.get(name, leaf)


def _live_content(part: Any) -> object:
    if isinstance(part, torch.Tensor | LocalBlocks):
        return part.dtype, tuple(part.shape)
    return type_name(part) if is_stateful(part) else None


def _whole_or_parts(
    name: str, contents: Mapping[str, object], chosen: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield an entry with its content, or the chosen ones of its parts if these are not all. The content is the dtype
    and shape of each tensor, and the class of each object, by its name in the entry."""
    whole = [(name, contents)] if chosen and len(chosen) == len(contents) else []
    for each, inside in whole or [(each, {each: contents[each]}) for each in chosen]:
        yield each, {n.removeprefix(each): c for n, c in inside.items() if c is not None}


def _names_of(key: Any, value: object) -> Iterator[str]:
    try:
        name = names.component(key)
    except builtin_codecs.NotEncodableError:
        return
    yield name
    yield from (found for found, _ in live_parts(value, name))
    yield from key_names(unwrap(value), name)


def live_parts(live: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and objects at and below a name of the state, each with its name."""
    for below, value in visit_state(live, name):
        if isinstance(value, nn.Module):
            scan = modules.scan(value, below)
            if scan.refused is None:
                for key, each in value.state_dict().items():
                    yield f"{below}.{scan.key_name(key)}", each
        elif isinstance(value, torch.Tensor | LocalBlocks) or is_stateful(value):
            yield below, value


def assigned(target: Any, source: Any) -> Any:
    """Make ``target`` equal to ``source``, in place where the state holds a list, dict, set, array or generator: the
    program's references to it see the restored value. Return the object to store in the state."""
    if isinstance(target, torch.Generator):
        return _set_generator(target, source)
    if type(target) is not type(source):
        return source
    if type(source) in (dict, OrderedDict, Counter):
        items = {k: assigned(target[k], v) if k in target else v for k, v in source.items()}
        target.clear()
        for key, value in items.items():
            target[key] = value
        return target
    if type(source) is list:
        kept = [assigned(t, s) for t, s in zip(target, source, strict=False)]
        target[:] = kept + source[len(kept) :]
        return target
    if type(source) is tuple and len(source) == len(target):
        merged = tuple(map(assigned, target, source))
        return target if all(map(operator.is_, merged, target)) else merged
    if type(source) is set:
        target.clear()
        target.update(source)
        return target
    return target if numpy_values.refill(target, source) else source


def _set_generator(target: torch.Generator, source: Any) -> Any:
    if isinstance(source, torch.Generator):
        if source.device.type != target.device.type:
            return source
        source = source.get_state()
    elif not isinstance(source, torch.Tensor):
        return source
    try:
        target.set_state(source)
    except RuntimeError as error:
        raise RestoreError(
            f"restore: the saved generator does not fit the one on {target.device}: {error}"
        ) from error
    return target
