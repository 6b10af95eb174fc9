"""Restoring into a state: which stored bytes go into which memory, and what is put back once they are there.

A plan is made from the header alone, and whatever does not fit is said before anything is written. The tree of the
checkpoint and the state are walked side by side: keys meet keys, a module's tensors meet by name (so a wrapped module
takes what a bare one saved), an optimizer's by its parameters' names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.errors import RestoreError
from tierfall.core.image import codec, modules, naming, optimizers, put, random_state
from tierfall.core.image.build import CPU, Fill, Want
from tierfall.core.image.files import refuse_files
from tierfall.core.image.fill_optimizer import OptimizerFiller
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.item import Item, unwrap
from tierfall.core.image.naming import Trail
from tierfall.core.image.nodes import (
    CodecNode,
    ConflictNode,
    KeptNode,
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
)
from tierfall.core.image.report import Report
from tierfall.core.image.walk import is_stateful
from tierfall.core.image.work import Action, Selection, Work
from tierfall.core.words import with_article

_NEVER_MISSED = (ValueNode, RandomNode, KeptNode)
Put = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class FillPlan:
    """What is to be read, and where it goes; ``finish`` is called once every fill is."""

    fills: tuple[Fill, ...]
    wants: tuple[Want, ...]
    _stages: tuple[tuple[Action, ...], ...]

    def finish(self) -> None:
        """Do what needs the bytes: copy into tensors that have no flat view, put values back, call load_state_dict of
        other objects (last, in the order of the state), and set the random state."""
        for stage in self._stages:
            for action in stage:
                action()


def plan_fill(
    state: Mapping[Any, object],
    header: ImageHeader,
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
) -> FillPlan:
    """Plan to restore an image into a state, in place; writes nothing.

    ``only`` are dotted prefixes of names; without it everything is restored, the random state too. ``strict`` demands
    that tensors and objects are the same on both sides. Raises RestoreError that names what does not fit.
    """
    if not isinstance(state, Mapping):
        raise RestoreError(
            f"restore: state is {with_article(type(state).__name__)}; expected a mapping"
        )
    if isinstance(only, str):
        raise RestoreError(
            f"restore: only must be a list of names, such as [{only!r}], not a string"
        )
    refuse_files(header, doing="restore")
    selection = Selection(None if only is None else tuple(only))
    _check_prefixes(selection, header)
    work = Work(header, selection, Report(strict), modules.scan_state(state))
    _Filler(work).top(state, header.tree)
    work.report.raise_if_any(header.what)
    return FillPlan(work.builder.fills(), work.builder.wants(), work.stages())


def _check_prefixes(selection: Selection, header: ImageHeader) -> None:
    if selection.prefixes is None:
        return
    names = [name for name, _ in leaves(header.tree, "")]
    for prefix in selection.prefixes:
        if any(naming.is_within(name, prefix) for name in names):
            continue
        whole = next((name for name in names if naming.is_within(prefix, name)), None)
        if whole is not None:
            raise RestoreError(
                f"restore: only={prefix!r} asks for a part of {whole!r}, which is restored as one: ask for that"
            )
        known = {name[:end] for name in names for end in _ends(name)}
        near = difflib.get_close_matches(prefix, known, n=3, cutoff=0.3)
        raise RestoreError(
            f"restore: {header.what} holds nothing named {prefix!r}; nearest: {', '.join(near or sorted(known)[:3])}"
        )


def _ends(name: str) -> list[int]:
    return [i for i, letter in enumerate(name) if letter == "."] + [len(name)]


class _Filler:
    """Walks tree and state side by side, and notes what to fill and what to do after."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.selection = work.selection
        self.report = work.report
        self.builder = work.builder
        self.fitter = work.fitter

    def top(self, state: Mapping[Any, object], tree: MapNode) -> None:
        random = [n for _, n in tree.entries if isinstance(n, RandomNode)]
        if random and random_state.ENTRY not in state and self.selection.has(random_state.ENTRY):
            self.builder.prepare(random[0], CPU)
            self.work.last.append(lambda: random_state.apply(self.builder.build(random[0], CPU)))
        self._mapping(tree, state, "", None)

    # ---- side by side

    def visit(self, node: Node, live: Any, place: Put, name: str, trail: Trail) -> None:
        """Restore ``node`` into ``live``, which stands at ``name``; ``place`` puts another object there."""
        if not self.selection.touches(name):
            return
        if type(live) is Item:
            live, place = _open_item(live)
        match node:
            case TensorNode() | QuantizedNode():
                self._tensor(node, live, name)
            case ValueNode() | CodecNode():
                self._value(node, live, place, name)
            case MapNode() if type(live) in codec.MAPPINGS:
                self._mapping(node, live, name, trail)
            case SequenceNode() if type(live) is (tuple if node.is_tuple else list):
                self._sequence(node, live, place, name, trail)
            case ModuleNode() if isinstance(live, nn.Module):
                self._module(node, live, name, trail)
            case OptimizerNode() if isinstance(live, Optimizer) and optimizers.is_stock(live):
                OptimizerFiller(self.work, node, live, name).plan()
            case ObjectNode() | OptimizerNode() if is_stateful(live):
                self._object(node, live, name, trail)
            case _:
                self._mismatch(node, live, name)

    def _mismatch(self, node: Node, live: Any, name: str) -> None:
        if isinstance(node, KeptNode):
            return
        if isinstance(node, ConflictNode):
            self.report.refuses(name, node.reason)
        else:
            self.report.differs(name, _kind(node), with_article(type(live).__qualname__))

    def _mapping(self, node: MapNode, live: Mapping[Any, Any], name: str, trail: Trail) -> None:
        stored = dict(node.entries)
        for key, value in live.items():
            below = naming.join(name, naming.part(key))
            if key in stored:
                place = self._item_setter(live, key, below)
                self.visit(stored[key], value, place, below, (trail, key))
            else:
                self._extra(value, below)
        for key, child in node.entries:
            if key not in live:
                self._absent(child, naming.join(name, naming.part(key)))

    def _item_setter(self, live: Any, key: Any, name: str) -> Put:
        def put_back(value: object) -> None:
            if value is live[key]:
                return
            if not isinstance(live, MutableMapping):
                raise RestoreError(
                    f"restore: {name} cannot be put back, since {type(live).__name__} cannot be written; pass a dict"
                )
            live[key] = value

        return put_back

    def _sequence(self, node: SequenceNode, live: Any, place: Put, name: str, trail: Trail) -> None:
        items = list(live) if node.is_tuple else live
        for index, (child, value) in enumerate(zip(node.nodes, live, strict=False)):

            def put_at(value: object, index: int = index) -> None:
                items[index] = value

            self.visit(child, value, put_at, f"{name}.{index}", (trail, index))
        for index in range(len(live), len(node.nodes)):
            self._absent(node.nodes[index], f"{name}.{index}")
        for index in range(len(node.nodes), len(live)):
            self._extra(live[index], f"{name}.{index}")
        if node.is_tuple:
            # A tuple is made anew only where something in it could not be changed in place.
            self.work.puts.append(lambda: None if _same(items, live) else place(tuple(items)))

    def _tensor(self, node: TensorNode | QuantizedNode, live: Any, name: str) -> None:
        if not isinstance(live, torch.Tensor):
            self.report.differs(name, _kind(node), with_article(type(live).__qualname__))
        elif isinstance(node, QuantizedNode):
            self.fitter.quantized(node, live, name)
        else:
            self.fitter.tensor(node.slot, live, name)

    def _value(self, node: ValueNode | CodecNode, live: Any, place: Put, name: str) -> None:
        if isinstance(live, (torch.Tensor, nn.Module)) or is_stateful(live):
            self.report.differs(name, "a plain value", with_article(type(live).__qualname__))
            return
        self.builder.prepare(node, CPU)
        if any(True for _ in live_names(live, name)):
            self._extra(live, name)
            self.work.puts.append(lambda: _put_around(live, self.builder.build(node, CPU)))
            return
        self.work.puts.append(lambda: place(put.merge(live, self.builder.build(node, CPU))))

    # ---- what has a state_dict

    def _object(self, node: Node, live: Any, name: str, trail: Trail) -> None:
        if not self.selection.has(name):
            self.report.differs(
                name, "a part that was asked for", "an object that is restored as one"
            )
            return
        self.builder.prepare(node, CPU)
        self.work.loads.append(lambda: _load(live, self.builder.build(node, CPU), trail))

    def _module(self, node: ModuleNode, live: nn.Module, name: str, trail: Trail) -> None:
        scan = self.work.scans.of(live, name)
        state = live.state_dict()
        keys = {scan.key_name(key): key for key in state}
        rest: dict[str, tuple[Node, torch.device]] = {}
        for _, below, child in node.entries:
            full = f"{name}.{below}"
            if not self.selection.has(full):
                continue
            key = keys.pop(below, None)
            if key is None:
                self._absent(child, full)
            elif not self._module_entry(scan, key, state[key], child, full):
                rest[key] = (child, _device_of(state[key]))
        for below, key in keys.items():
            if self.selection.has(f"{name}.{below}"):
                self._extra(state[key], f"{name}.{below}", is_object=key in scan.owners)
        if rest:
            for child, device in rest.values():
                self.builder.prepare(child, device)
            self.work.loads.append(lambda: self._load_rest(live, rest, trail))

    def _module_entry(
        self, scan: modules.ModuleScan, key: str, live: Any, node: Node, name: str
    ) -> bool:
        """Restore one entry of a module in place; False where only load_state_dict can."""
        if key in scan.owners and not isinstance(live, torch.Tensor):
            return self._extra_state(scan.owners[key], node)
        if not isinstance(node, (TensorNode, QuantizedNode)) or not isinstance(live, torch.Tensor):
            return False
        owner = scan.owner_of(key, live)
        if owner is None and live.layout is torch.strided and live.numel():
            # A copy that a hook made: whatever is written into it is lost.
            return not self.fitter.compare(node.slot, live, name)
        if isinstance(node, QuantizedNode):
            self.fitter.quantized(node, live if owner is None else owner, name)
        else:
            self.fitter.tensor(node.slot, live, name)
        return True

    def _extra_state(self, owner: nn.Module, node: Node) -> bool:
        if type(owner).set_extra_state is nn.Module.set_extra_state:
            return False
        self.builder.prepare(node, CPU)
        self.work.puts.append(lambda: owner.set_extra_state(self.builder.build(node, CPU)))
        return True

    def _load_rest(
        self, live: nn.Module, rest: Mapping[str, tuple[Node, torch.device]], trail: Trail
    ) -> None:
        built = {key: self.builder.build(node, device) for key, (node, device) in rest.items()}
        if type(live).load_state_dict is nn.Module.load_state_dict:
            _load(live, built, trail, strict=False)
        else:
            # Its own load_state_dict may want all of it; what is in place already is given as it is.
            _load(live, {**live.state_dict(), **built}, trail)

    # ---- one side only

    def _absent(self, node: Node, name: str) -> None:
        for leaf_name, leaf in leaves(node, name):
            if self.selection.has(leaf_name) and not isinstance(leaf, _NEVER_MISSED):
                self.report.absent(leaf_name)

    def _extra(self, live: Any, name: str, *, is_object: bool = False) -> None:
        if is_object and self.selection.has(name):
            self.report.extra(name)
            return
        for found in live_names(live, name):
            if self.selection.has(found):
                self.report.extra(found)


def _open_item(holder: Item) -> tuple[Any, Put]:
    """Return what a wrapper holds, and how to put another object there."""
    while type(holder.value) is Item:
        holder = holder.value

    def put_back(value: object) -> None:
        holder.value = value

    return holder.value, put_back


def live_names(live: Any, name: str, depth: int = 0) -> Any:
    """Yield the names of the tensors and objects at and below a place of the state."""
    live = unwrap(live)
    if depth > codec.DEPTH_MAX:
        return
    if isinstance(live, nn.Module):
        scan = modules.scan(live, name)
        yield from (f"{name}.{scan.key_name(key)}" for key in live.state_dict())
    elif isinstance(live, torch.Tensor) or is_stateful(live):
        yield name
    elif type(live) in codec.MAPPINGS:
        for key, child in live.items():
            yield from live_names(child, naming.join(name, naming.part(key)), depth + 1)
    elif type(live) in (list, tuple):
        for index, child in enumerate(live):
            yield from live_names(child, f"{name}.{index}", depth + 1)


def _put_around(live: Any, source: Any) -> None:
    """Put a dict's values back beside tensors that the checkpoint does not have."""
    if type(live) in codec.MAPPINGS and type(source) in codec.MAPPINGS:
        for key, value in source.items():
            if key not in live or not any(True for _ in live_names(live[key], "")):
                live[key] = put.merge(live.get(key), value)


def _load(live: Any, built: Any, trail: Trail, **options: Any) -> None:
    try:
        live.load_state_dict(built, **options)
    except Exception as error:
        raise RestoreError(
            f"restore: load_state_dict of {naming.path(trail)} refused its state: {error}"
        ) from error


def _device_of(live: Any) -> torch.device:
    return live.device if isinstance(live, torch.Tensor) else CPU


def _same(items: Sequence[object], live: Sequence[object]) -> bool:
    return all(one is other for one, other in zip(items, live, strict=True))


def _kind(node: Node) -> str:
    match node:
        case TensorNode() | QuantizedNode():
            return "a tensor"
        case MapNode():
            return f"{with_article(node.kind)} that holds tensors"
        case SequenceNode():
            return f"a {'tuple' if node.is_tuple else 'list'} that holds tensors"
        case ModuleNode():
            return "a module"
        case OptimizerNode():
            return "an optimizer"
        case RandomNode():
            return "the random state of the process (name your own entry otherwise)"
        case _:
            return "an object with load_state_dict"
