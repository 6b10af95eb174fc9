"""Restoring into a state: which stored bytes go into which memory, and what is put back once they are there.

A plan is made from the header alone, and whatever does not fit is said before anything is written. The tree of the
checkpoint and the state are walked side by side: keys meet keys, a module's tensors meet by name (so a wrapped module
takes what a bare one saved), an optimizer's by its parameters' names.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.raw_files import refuse_files
from tierfall.core.image.tree import (
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
)
from tierfall.core.load import assign
from tierfall.core.load.build import CPU, BlockTarget, Fill
from tierfall.core.load.choices import Choices, plain_value, renamed
from tierfall.core.load.fill_module import ModuleFiller
from tierfall.core.load.fill_optimizer import OptimizerFiller
from tierfall.core.load.plan import Action, RestoreWork, live_names
from tierfall.core.state import optimizers
from tierfall.core.state.item import Item, unwrap
from tierfall.core.state.state_dicts import is_stateful, lost_entries, state_dict_of, type_name
from tierfall.core.tensors import names, rng, value_codec
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.written_memory import AddressRange, AddressRanges, LiveMemory
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import with_article

logger = logging.getLogger("tierfall")
_WITH_NAMES = (dict, OrderedDict)
Put = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class FillPlan:
    """What is to be read, and where it goes; ``finish`` is called once every fill is."""

    fills: tuple[Fill, ...]
    targets: tuple[BlockTarget, ...]
    _stages: tuple[tuple[Action, ...], ...]
    _work: RestoreWork

    def written(self, targets: Iterable[torch.Tensor]) -> list[LiveMemory]:
        """Return the tensors of the state that were written to where ``targets``, parts of those of ``fills``, were."""
        ranges = AddressRanges(AddressRange.of(target) for target in targets)
        return [live for live in self._work.fitter.in_place() if ranges.overlaps(live.range)]

    def unfilled(self, written: Iterable[LiveMemory]) -> list[str]:
        """Name the tensors, of those that another plan for this state has ``written`` to, that would stay so: this plan
        neither fills them nor removes them from the state."""
        filled = AddressRanges(live.range for live in self._work.fitter.in_place())
        return [
            live.name
            for live in written
            if not filled.contains(live.range)
            and not any(names.is_within(live.name, name) for name in self._work.renewed)
        ]

    def finish(self) -> None:
        """Do what needs the bytes: copy into tensors that have no flat view, put values back, call load_state_dict of
        other objects (last, in the order of the state), and set the random state."""
        for stage in self._stages:
            for action in stage:
                action()


def plan_fill(
    state: Mapping[Any, object], header: ImageHeader, choices: Choices | None = None
) -> FillPlan:
    """Plan to restore an image into a state, in place; writes nothing.

    Without ``choices`` everything is restored, the random state too, and both sides must have the same names. Raises
    RestoreError that names what does not fit.
    """
    if not isinstance(state, Mapping):
        raise RestoreError(
            f"restore: state is {with_article(type(state).__name__)}; expected a mapping"
        )
    refuse_files(header, doing="restore")
    choices = choices or Choices()
    header = renamed(header, choices.rename)
    work = RestoreWork.begin(header, state, choices)
    _Filler(work).top(state, header.tree)
    work.fitter.check_kept()
    work.fitter.check_overlaps()
    work.report.raise_if_any(header.what)
    return FillPlan(work.builder.fills(), work.builder.targets(), work.stages(), work)


class _Filler:
    """Walks tree and state side by side, and notes what to fill and what to do after."""

    def __init__(self, work: RestoreWork) -> None:
        self.work = work
        self.selection = work.selection
        self.report = work.report
        self.builder = work.builder
        self.fitter = work.fitter

    def top(self, state: Mapping[Any, object], tree: MapNode) -> None:
        random = [n for _, n in tree.entries if isinstance(n, RandomNode)]
        if random and rng.ENTRY not in state and self.selection.has(rng.ENTRY):
            self.builder.prepare(random[0], CPU)
            self.work.last.append(lambda: rng.apply(self.builder.build(random[0], CPU)))
        self._mapping(tree, state, "", None)

    # ---- side by side

    def visit(self, node: Node, live: Any, place: Put, name: str, trail: Trail) -> None:
        """Restore ``node`` into ``live``, which stands at ``name``; ``place`` puts another object there."""
        if not self.selection.selects_at_or_below(name):
            if self.selection.skipped(name):
                self.fitter.skip(unwrap(live), name)
            return
        if type(live) is Item:
            live, place = _open_item(live)
        match node:
            case TensorNode() | QuantizedNode():
                self._tensor(node, live, name)
            case ValueNode() | CodecNode():
                self._value(node, live, place, name)
            case MapNode() if type(live) in value_codec.MAPPINGS:
                self._mapping(node, live, name, trail)
            case SequenceNode() if type(live) is (tuple if node.is_tuple else list):
                self._sequence(node, live, place, name, trail)
            case ModuleNode() if isinstance(live, nn.Module):
                ModuleFiller(self.work, node, live, name, trail).plan()
            case ObjectNode() | OptimizerNode() if is_stateful(live):
                self._stateful(node, live, name, trail)
            case _:
                self._mismatch(node, live, name)

    def _stateful(
        self, node: ObjectNode | OptimizerNode, live: Any, name: str, trail: Trail
    ) -> None:
        if not self._is_of_type(live, name):
            return
        match node, live:
            case OptimizerNode(), Optimizer() if optimizers.is_stock(live):
                OptimizerFiller(self.work, node, live, name).plan()
            case _:
                self._object(node, live, name, trail)

    def _is_of_type(self, live: object, name: str) -> bool:
        """Say whether an object is of the class whose state the checkpoint has; report it where it is not."""
        stored = (self.work.header.types or {}).get(name)
        if stored is None or stored == type_name(live) or name in self.work.choices.retype:
            return True
        self.report.refuses(
            name,
            f"the checkpoint has the state of {with_article(stored)}, the state has {with_article(type_name(live))}; "
            f"retype=[{name!r}] restores it all the same, skip=[{name!r}] leaves it as it is",
        )
        return False

    def _mismatch(self, node: Node, live: Any, name: str) -> None:
        if isinstance(node, KeptNode) or self._is_state_dict(live, name):
            return
        if isinstance(node, MapNode) and is_stateful(live):
            self._refuse_dict(live, name)
        elif isinstance(node, ConflictNode):
            self.report.refuses(name, node.reason)
        else:
            self.report.differs(name, _kind(node), with_article(type(live).__qualname__))

    def _refuse_dict(self, live: Any, name: str) -> None:
        self.report.refuses(
            name,
            f"the checkpoint has a dict, such as a state_dict(), the state has {with_article(type_name(live))}: "
            "read the checkpoint by tierfall.load() and call load_state_dict()",
        )

    def _refuse_plain(self, node: ValueNode | CodecNode, live: Any, name: str) -> None:
        """Report a plain value in place of a tensor or an object."""
        stored = plain_value(self.work.header, node) if isinstance(node, ValueNode) else None
        if type(stored) in value_codec.MAPPINGS and is_stateful(live):
            self._refuse_dict(live, name)
        else:
            self.report.differs(name, "a plain value", with_article(type(live).__qualname__))

    def _mapping(self, node: MapNode, live: Mapping[Any, Any], name: str, trail: Trail) -> None:
        if self._is_state_dict(live, name):
            return
        stored = dict(node.entries)
        lost = lost_entries(live)
        for key, value in live.items():
            below = names.join(name, names.component(key))
            if key in lost and self.selection.selects_at_or_below(below):
                self.report.refuses(
                    below,
                    "is an entry of a module's state_dict() that is no memory of the module's, and what is restored "
                    "into it reaches no module: put the module itself into the state",
                )
            elif key in stored:
                place = self._item_setter(live, key, below)
                self.visit(stored[key], value, place, below, (trail, key))
            else:
                self.work.extra(value, below)
        for key, child in node.entries:
            if key not in live:
                self.work.absent(child, names.join(name, names.component(key)))

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
            self.work.absent(node.nodes[index], f"{name}.{index}")
        for index in range(len(node.nodes), len(live)):
            self.work.extra(live[index], f"{name}.{index}")
        if node.is_tuple:
            # A tuple is made anew only where something in it could not be changed in place.
            self.work.puts.append(lambda: None if _same(items, live) else place(tuple(items)))

    def _tensor(self, node: TensorNode | QuantizedNode, live: Any, name: str) -> None:
        if not isinstance(live, torch.Tensor):
            self.report.differs(name, _kind(node), with_article(type(live).__qualname__))
            return
        if isinstance(live, nn.Parameter):
            self.work.filled.append(live)
        if isinstance(node, QuantizedNode):
            self.fitter.quantized(node, live, name)
        else:
            self.fitter.tensor(node.slot, live, name)

    def _value(self, node: ValueNode | CodecNode, live: Any, place: Put, name: str) -> None:
        if isinstance(live, (torch.Tensor, nn.Module)) or is_stateful(live):
            self._refuse_plain(node, live, name)
            return
        if self._holds_state_dict(live, name):
            return
        self.builder.prepare(node, CPU)
        stored = plain_value(self.work.header, node) if isinstance(node, ValueNode) else None
        self._compare_keys(stored, live, name)
        if _holds_tensors(live):
            self._compare_objects(stored, live, name)
            self.work.puts.append(
                lambda: self._put_around(live, self.builder.build(node, CPU), name)
            )
            return

        def put_back() -> None:
            value = self.builder.build(node, CPU)
            self._keep_skipped(live, value, name)
            place(assign.merge(live, value))

        self.work.puts.append(put_back)

    def _keeps(self, name: str, key: Any) -> bool:
        """Say whether an entry of a plain mapping stays as it is in the state."""
        return self.selection.skipped(names.join(name, names.component(key)))

    def _keep_skipped(self, live: Any, value: Any, name: str) -> None:
        """Give a plain mapping those entries of the state's own that are skipped."""
        if type(live) not in value_codec.MAPPINGS or type(value) not in value_codec.MAPPINGS:
            return
        for key in [*value, *(key for key in live if key not in value)]:
            if not self._keeps(name, key):
                if key in live and key in value:
                    self._keep_skipped(
                        live[key], value[key], names.join(name, names.component(key))
                    )
            elif key in live:
                value[key] = live[key]
            else:
                del value[key]

    def _put_around(self, live: Any, source: Any, name: str) -> None:
        """Put a dict's values back beside tensors that the checkpoint does not have."""
        if type(live) not in value_codec.MAPPINGS or type(source) not in value_codec.MAPPINGS:
            return
        self._keep_skipped(live, source, name)
        for key, value in source.items():
            if key not in live or not _holds_tensors(live[key]):
                live[key] = assign.merge(live.get(key), value)

    def _compare_keys(self, stored: Any, live: Any, name: str) -> None:
        """Compare the keys of a plain dict, which is put back whole, and of those in it. Those of counters are data.

        Keys that only the checkpoint has came after the program's first lines, and are put back. Those that only the
        state has would be lost: an error at the start of a program. In one that goes back to an earlier step they may
        have come since, unless each side has words that the other has not: then one was misspelt or renamed.
        """
        if type(live) not in _WITH_NAMES or type(stored) not in _WITH_NAMES:
            return
        plain = [key for key in live if not _holds_tensors(live[key])]
        only_live = [key for key in plain if key not in stored and not self._keeps(name, key)]
        only_stored = [key for key in stored if key not in live and not self._keeps(name, key)]
        texts = [key for key in only_live if isinstance(key, str)]
        renamed = _are_identifiers(only_live) and _are_identifiers(only_stored)
        if texts and (renamed or not self.work.choices.is_going_back):
            for key in texts:
                self.report.extra(names.join(name, names.component(key)))
            for key in only_stored if renamed else ():
                self.report.absent(names.join(name, names.component(key)), can_be_renamed=False)
        elif only_live and stored and len(plain) == len(live):
            self.work.puts.append(lambda: _log_removed(only_live, name))
        for key in plain:
            if key in stored and not self._keeps(name, key):
                below = names.join(name, names.component(key))
                self._compare_keys(stored[key], live[key], below)

    def _compare_objects(self, stored: Any, live: Any, name: str) -> None:
        """Compare a plain value with a container that holds tensors, or objects: these it has not."""
        if type(live) in value_codec.MAPPINGS and type(stored) in value_codec.MAPPINGS:
            for key, child in live.items():
                below = names.join(name, names.component(key))
                if not _holds_tensors(child) or self._keeps(name, key):
                    continue
                if key in stored:
                    self._compare_objects(stored[key], child, below)
                else:
                    self.work.extra(child, below)
        elif stored in ([], ()):
            self.work.extra(live, name)
        else:
            self.report.differs(name, "a plain value", with_article(type(live).__qualname__))

    # ---- what has a state_dict

    def _object(self, node: Node, live: Any, name: str, trail: Trail) -> None:
        if not self.selection.has(name):
            self.report.differs(
                name, "a part that was asked for", "an object that is restored as one"
            )
            return
        if isinstance(live, torch.amp.GradScaler) and live.is_enabled() and self._is_empty(node):
            self.report.refuses(
                name,
                f"the checkpoint has a scaler that was switched off; skip=[{name!r}] begins with a new one",
            )
            return
        self.builder.prepare(node, CPU)
        self.work.loads.append(lambda: _load(live, self.builder.build(node, CPU), trail))
        if type(live).__module__.startswith("torchdata.stateful_dataloader"):
            # Its iterator is made now, not in the loop: what that draws would be missing from the random state, which
            # is set after this.
            self.work.loads.append(live.state_dict)

    def _is_empty(self, node: Node) -> bool:
        """Say whether an object's state is an empty dict."""
        inner = node.state if isinstance(node, ObjectNode) else None
        return isinstance(inner, ValueNode) and plain_value(self.work.header, inner) == {}

    def _holds_state_dict(self, live: Any, name: str) -> bool:
        """Say whether a plain value is, or holds, what an object's state_dict() returned; report it then."""
        live = unwrap(live)
        if self._is_state_dict(live, name):
            return True
        inner: list[tuple[Any, Any]] = []
        if type(live) in value_codec.MAPPINGS:
            inner = [
                (names.component(key), child) for key, child in live.items() if type(key) is str
            ]
        elif type(live) in (list, tuple):
            inner = [*enumerate(live)]
        held = [self._holds_state_dict(child, f"{name}.{key}") for key, child in inner]
        return any(held)

    def _is_state_dict(self, live: Any, name: str) -> bool:
        """Say whether a dict is what an object's state_dict() returned; report it then."""
        kind = state_dict_of(live)
        if kind is None:
            return False
        self.report.refuses(
            name,
            f"is the state_dict() of {kind}, and what is restored into it reaches no {kind.split()[-1]}: put the "
            "object itself into the state, or read the checkpoint by tierfall.load() and call load_state_dict()",
        )
        return True


def _open_item(holder: Item) -> tuple[Any, Put]:
    """Return what a wrapper holds, and how to put another object there."""
    while type(holder.value) is Item:
        holder = holder.value

    def put_back(value: object) -> None:
        holder.value = value

    return holder.value, put_back


def _are_identifiers(keys: Sequence[Any]) -> bool:
    """Say whether there are keys, all of them such as programs spell out, not numbers of steps and the like."""
    return bool(keys) and all(isinstance(key, str) and key.isidentifier() for key in keys)


def _log_removed(keys: Sequence[Any], name: str) -> None:
    logger.warning(
        "restore: %s of %s is not in the checkpoint, and is removed: a mapping is put back whole (skip=[%r] keeps it)",
        ", ".join(map(repr, keys)),
        name,
        names.join(name, names.component(keys[0])),
    )


def _holds_tensors(live: Any) -> bool:
    """Say whether a part of the state is, or holds, a tensor or an object."""
    return any(True for _ in live_names(live, ""))


def _load(live: Any, built: Any, trail: Trail) -> None:
    try:
        live.load_state_dict(built)
    except Exception as error:
        raise RestoreError(
            f"restore: load_state_dict of {names.path(trail)} refused its state: {error}"
        ) from error


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
