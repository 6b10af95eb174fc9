"""Restoring into a state: which stored bytes are read into which memory, and what is assigned afterwards.

The plan is made from the header only. Mismatches are reported before anything is written. The trees of the checkpoint
and of the state are walked side by side: entries match by key; tensors of a module by name, so that a wrapped module
may restore what a bare one saved; tensors of an optimizer by the names of its parameters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    TENSORS,
    CodecNode,
    ConflictNode,
    KeptNode,
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    positions_of,
    walk,
)
from tierfall.core.load.build import CPU, Make
from tierfall.core.load.choices import Blob, Choices, plain_value, renamed, value_blobs
from tierfall.core.load.fill_optimizer import OptimizerFiller
from tierfall.core.load.mismatch import advice_for_ranks
from tierfall.core.load.plan import ReadPlan, RestoreWork, Setter, assigned, live_parts
from tierfall.core.state import optimizers
from tierfall.core.state.item import Item, visit_state
from tierfall.core.state.state_dicts import (
    is_stateful,
    lost_entries,
    state_dict_of,
    type_name,
)
from tierfall.core.tensors import names, rng, value_codec, wrappers
from tierfall.core.tensors.builtin_codecs import UnknownValue
from tierfall.core.tensors.dtensor import LocalBlocks, as_dtensor_like, is_sharded, local_tensor
from tierfall.core.tensors.tensors import refusal, to_bytes
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import format_some, with_article

logger = logging.getLogger("tierfall")
_COMPARED_MAPPINGS = (dict, OrderedDict)
"""Their keys are names that a program chose. The keys of a Counter are data."""


@dataclass(slots=True)
class ValueFiller:
    """Plans one plain value as part of a restore: it is replaced as a whole, except for skipped entries. ``live`` is
    the state's value under ``name``; ``set_value`` replaces it.

    A dict of the state may hold tensors or objects where the checkpoint holds a plain dict. Then only its plain entries
    are replaced.
    """

    _work: RestoreWork
    _node: ValueNode | CodecNode
    _live: Any
    _set_value: Setter
    _name: str
    _make: Make = field(init=False)
    _has_others: bool = field(init=False)

    def plan(self) -> None:
        work, node, live = self._work, self._node, self._live
        try:
            self._make = work.builder.prepare(node, CPU)
        except RestoreError as error:  # a class that is not imported, for example
            reason = str(error).removeprefix("restore: ")
            work.report.refuses(self._name, f"{reason}; skip=[{self._name!r}] leaves it unchanged")
            return
        if isinstance(node, ValueNode) and isinstance(live, dict | list | set):
            work.note_object(live, self._name, work.header.values[node.number])
        stored = value_blobs(work.header, node) if isinstance(node, ValueNode) else None
        self._has_others = holds_tensors(live)
        self._compare(stored, live, self._name)
        work.assignments.append(self._assign_plain_entries if self._has_others else self._assign)

    # ---- before the bytes

    def _compare(self, stored: Any, live: Any, name: str, *, keys: bool = True) -> None:
        """Compare a value, and what is in it, with that of the state, and record the arrays and generators that are
        changed in place. Report tensors and objects that the checkpoint lacks; the keys of a mapping unless it is in a
        list (``keys``)."""
        if isinstance(stored, Blob):
            self._work.matcher.share(self._node.own_positions()[stored.number], live, name)
        if type(live) in value_codec.MAPPINGS and type(stored) in value_codec.MAPPINGS:
            self._compare_entries(stored, live, name, keys=keys)
        elif self._has_others and holds_tensors(live) and stored in ([], ()):
            self._work.extra(live, name)
        elif self._has_others and holds_tensors(live):
            self._work.report.differs(name, "a plain value", _kind_of_live(live))
        elif (
            type(live) in (list, tuple)
            and type(live) is type(stored)
            and self._node.own_positions()
        ):
            for index, (below, child) in enumerate(zip(stored, live, strict=False)):
                self._compare(below, child, f"{name}.{index}", keys=False)

    def _compare_entries(self, stored: Any, live: Any, name: str, *, keys: bool) -> None:
        keys = keys and type(live) in _COMPARED_MAPPINGS and type(stored) in _COMPARED_MAPPINGS
        if keys:
            self._compare_keys(stored, live, name)
        for key, child in live.items():
            if self._is_skipped(name, key):
                continue
            below = names.join(name, names.component(key))
            if key in stored:
                self._compare(stored[key], child, below, keys=keys)
            elif holds_tensors(child):
                self._work.extra(child, below)

    def _compare_keys(self, stored: Any, live: Any, name: str) -> None:
        """Compare the keys of a plain dict with those in the checkpoint.

        Keys that only the checkpoint has are restored: the program added them after its start. Keys that only the state
        has are removed by the restore. That is an error at the start of a program. After training it is allowed, since
        the program may have added them after the checkpoint; unless both sides have identifiers that the other lacks,
        for then a key was misspelt or renamed.
        """
        report = self._work.report
        plain = [key for key in live if not holds_tensors(live[key])]
        only_live = [key for key in plain if key not in stored and not self._is_skipped(name, key)]
        only_stored = [key for key in stored if key not in live and not self._is_skipped(name, key)]
        texts = [key for key in only_live if isinstance(key, str)]
        renamed = _are_identifiers(only_live) and _are_identifiers(only_stored)
        if texts and (renamed or not self._work.choices.is_going_back):
            for key in texts:
                report.extra(names.join(name, names.component(key)))
            for key in only_stored if renamed else ():
                report.absent(names.join(name, names.component(key)))
        elif only_live and stored and len(plain) == len(live):
            self._work.assignments.append(lambda: _log_removed(only_live, name))

    def _is_skipped(self, name: str, key: Any) -> bool:
        return self._work.choices.skipped(names.join(name, names.component(key)))

    # ---- after the bytes

    def _assign(self) -> None:
        value = self._make()
        self._keep_skipped(self._live, value, self._name)
        self._set_value(assigned(self._live, value))

    def _assign_plain_entries(self) -> None:
        """Replace the plain entries of a dict that holds tensors, too."""
        source = self._make()
        self._keep_skipped(self._live, source, self._name)
        _replace_plain(self._live, source)

    def _keep_skipped(self, live: Any, value: Any, name: str) -> None:
        """Copy the skipped entries of ``live`` into the mapping that replaces it."""
        if type(live) not in value_codec.MAPPINGS or type(value) not in value_codec.MAPPINGS:
            return
        for key in {**value, **live}:
            below = names.join(name, names.component(key))
            if self._work.choices.skipped(below):
                if key in live:
                    value[key] = live[key]
                else:
                    del value[key]
            elif key in value and key in live:
                self._keep_skipped(live[key], value[key], below)


def _replace_plain(live: Any, source: Any) -> None:
    """Replace the plain entries of a mapping, and of those mappings in it that hold tensors, too."""
    if type(live) not in value_codec.MAPPINGS or type(source) not in value_codec.MAPPINGS:
        return
    for key, value in source.items():
        if key in live and holds_tensors(live[key]):
            _replace_plain(live[key], value)
        else:
            live[key] = assigned(live.get(key), value)


def _are_identifiers(keys: Sequence[Any]) -> bool:
    """Return whether ``keys`` is not empty and holds only identifiers, not step numbers and other data."""
    return bool(keys) and all(isinstance(key, str) and key.isidentifier() for key in keys)


def _log_removed(keys: Sequence[Any], name: str) -> None:
    logger.warning(
        "restore: %s of %s is not in the checkpoint, and is removed: a plain mapping is replaced as a whole "
        "(skip=[%r] keeps it)",
        ", ".join(map(repr, keys)),
        name,
        names.join(name, names.component(keys[0])),
    )


def holds_tensors(live: Any) -> bool:
    """Return whether a value of the state is, or holds, a tensor or an object with a state_dict."""
    return any(True for _ in live_parts(live, ""))


class ModuleFiller:
    """Plans one module as part of a restore: its own tensors in place, other entries of its state_dict by
    ``load_state_dict``.

    A state_dict hook may return keys that are copies or combinations of parameters. Values written into these would not
    change the module. If one entry is such a copy, the module's ``load_state_dict`` is called with all entries, as its
    hooks expect, and the result is compared with the stored values.
    """

    def __init__(self, work: RestoreWork, node: ModuleNode, live: nn.Module, name: str) -> None:
        self._work = work
        self._node = node
        self._live = live
        self._name = name
        self._scan = work.scans.of(live, name)
        self._in_place: list[str] = []
        self._rest: dict[str, Callable[[], object]] = {}

    def plan(self) -> None:
        work, scan = self._work, self._scan
        if scan.refused is not None:
            work.report.refuses(self._name, scan.refused)
            return
        state = self._state_dict()
        keys = {scan.key_name(key): key for key in state}
        if work.report.strict and self._differs_by_prefix(keys):
            return
        for _, below, child in self._node.entries:
            full = f"{self._name}.{below}"
            key = keys.pop(below, None)
            if not work.choices.has(full):
                continue
            if key is None:
                work.absent(child, full)
            else:
                self._entry(key, state[key], child, full)
        for below, key in keys.items():
            full = f"{self._name}.{below}"
            if work.choices.has(full):
                work.extra(state[key], full, is_object=key in scan.by_extra_state_key)
        if self._rest or self._has_own_load():
            work.state_loads.append(lambda: self._load(tuple(state)))
        else:
            work.state_loads.append(self._after_load)

    def _differs_by_prefix(self, keys: Collection[str]) -> bool:
        """Return whether all names of one side, and of that alone, begin with one prefix; report it where they do."""
        name, stored, live = self._name, sorted(n for _, n, _ in self._node.entries), sorted(keys)
        if len(stored) != len(live) or not set(stored).isdisjoint(live):
            return False
        if not all(self._work.choices.has(f"{name}.{each}") for each in stored):
            return False
        for what, longer, shorter, before, after in (
            ("in the state, and not in the checkpoint", live, stored, name, f"{name}.{{}}"),
            ("in the checkpoint, and not in the state", stored, live, f"{name}.{{}}", name),
        ):
            prefix = longer[0].removesuffix(shorter[0]) if longer else ""
            if prefix.endswith(".") and longer == [prefix + each for each in shorter]:
                rename = {before.format(prefix[:-1]): after.format(prefix[:-1])}
                stripped = (
                    " (tierfall import removes it, as a wrapper's)" if "module." in prefix else ""
                )
                self._work.report.refuses(
                    name, f"all names have the prefix {prefix!r} {what}{stripped}: rename={rename}"
                )
                return True
        return False

    def _state_dict(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._live.state_dict()
        except Exception as error:
            raise RestoreError(
                f"restore: state_dict() of {self._name} raised {type(error).__name__}: {error}"
            ) from error
        return found

    def _has_own_load(self) -> bool:
        """Return whether the module, or one in it, overrides how torch loads modules."""
        if _is_own(type(self._live), "load_state_dict"):
            return True
        kinds = {type(module) for _, _, module in self._scan.module_prefixes}
        return any(_is_own(kind, "_load_from_state_dict") for kind in kinds)

    def _entry(self, key: str, live: Any, node: Node, name: str) -> None:
        """Restore one entry in place, or plan how its value is built for load_state_dict."""
        work = self._work
        if key in self._scan.by_extra_state_key:
            self._extra_state(key, self._scan.by_extra_state_key[key], node, live)
            return
        if not isinstance(node, TENSORS) or not isinstance(live, torch.Tensor):
            device = live.device if isinstance(live, torch.Tensor) else CPU
            self._through_load(key, node, device)
            return
        if is_lazy(live):
            work.report.refuses(name, f"cannot be restored into: {refusal(live)}")
            return
        owner = self._scan.owner_of(key, live)
        if owner is not None and owner.numel() != live.numel():
            owner = None  # a hook's view of a part of it: load_state_dict restores it
        if owner is None and live.layout is torch.strided and live.numel():
            if isinstance(node, WrapperNode):
                self._through_load(key, node, live.device)
            elif work.matcher.compare(node.position, live, name):
                self._copy(key, live, node, name)
            return
        self._in_place.append(key)
        if isinstance(owner, nn.Parameter):
            work.filled_parameters.append(owner)
        if isinstance(node, QuantizedNode) and owner is not None:
            live = owner
        work.matcher.fill(node, live, name)

    def _copy(
        self, key: str, live: torch.Tensor, node: TensorNode | QuantizedNode, name: str
    ) -> None:
        """Restore a tensor that is not the module's memory: a copy that a hook made."""
        if not is_sharded(live):
            self._through_load(key, node, live.device)
            return
        builder = self._work.builder
        if not builder.header.merged or isinstance(node, QuantizedNode):
            make = builder.prepare(node, live.device)
            self._rest[key] = lambda: as_dtensor_like(live, make())
            return
        made = self._work.block_like(node.position, live, live.device, name)
        if made is not None:
            self._rest[key] = lambda: made

    def _through_load(self, key: str, node: Node, device: torch.device) -> None:
        self._rest[key] = self._work.builder.prepare(node, device)

    def _extra_state(self, key: str, owner: nn.Module, node: Node, live: Any) -> None:
        """Restore what ``get_extra_state`` returned. A tensor in it may have another shape than the saved one."""
        device = live.device if isinstance(live, torch.Tensor) else CPU
        if type(owner).set_extra_state is nn.Module.set_extra_state:
            self._through_load(key, node, device)
            return
        make = self._work.builder.prepare(node, device)
        self._work.assignments.append(lambda: owner.set_extra_state(make()))

    # ---- after the bytes

    def _after_load(self) -> None:
        """Call the post hooks of load_state_dict; all entries were filled in place."""
        for _, _, module in reversed(self._scan.module_prefixes):
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys([], []))

    def _load(self, keys: tuple[str, ...]) -> None:
        live, what = self._live, self._name
        whole = self._state_dict()
        if tuple(whole) != keys:
            raise RestoreError(
                f"restore: two calls of state_dict() of {what} returned different keys; its hooks must return the same "
                "keys at each call"
            )
        expected = {key: _digest(whole[key]) for key in self._in_place}
        built = {key: make() for key, make in self._rest.items()}
        expected |= {key: _digest(v) for key, v in built.items() if isinstance(v, torch.Tensor)}
        whole.update(built)
        self._work.filled_parameters += live.parameters()
        load_state_dict(live, whole, what)
        self._compare(expected, what)

    def _compare(self, expected: Mapping[str, bytes], what: str) -> None:
        after = self._state_dict()
        wrong = [
            key
            for key, digest in expected.items()
            if not isinstance(after.get(key), torch.Tensor) or _digest(after[key]) != digest
        ]
        if not wrong:
            return
        text = (
            f"restore: after load_state_dict of {what} its state_dict() differs from what was loaded: "
            f"{format_some([*map(repr, wrong)])}"
        )
        if not self._work.report.strict:
            logger.warning("%s", text)
            return
        name = f"{self._name}.{self._scan.key_name(wrong[0])}"
        raise RestoreError(
            f"{text}; its load hooks must reverse its state_dict hooks. skip=[{name!r}] leaves out an entry that does "
            "not matter, strict=False only logs a warning"
        )


def _is_own(kind: type[nn.Module], method: str) -> bool:
    """Return whether a class, or a base of it, overrides a method of torch."""
    definer = next(base for base in kind.__mro__ if method in base.__dict__)
    return definer.__module__.partition(".")[0] != "torch"


def _digest(tensor: torch.Tensor) -> bytes:
    """Digest dtype, shape and bytes of a tensor; of a sharded one, this rank's part; of a wrapper, its inner
    tensors."""
    found = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for local in map(local_tensor, wrappers.inner_tensors(tensor)):
        found.update(memoryview(to_bytes(local).cpu().numpy()))  # type: ignore[arg-type]
    return found.digest()


def plan_fill(
    state: Mapping[Any, object], header: ImageHeader, choices: Choices | None = None
) -> ReadPlan:
    """Plan to restore an image into a state, in place. Writes nothing.

    Without ``choices`` all is restored, including the random state, and both sides must have the same names. Raises
    RestoreError with the names of all mismatches.
    """
    choices = choices or Choices()
    header = renamed(header, choices.rename)
    work = RestoreWork(header, state, choices)
    _Filler(work).top(state, header.tree)
    work.report_kept()
    work.report_names()
    shared = tuple(work.matcher.shared_memory())
    work.report.raise_if_any(header.what)
    return ReadPlan(
        targets=tuple(work.builder.targets),
        shared=shared,
        in_place=work.matcher.in_place,
        replaced_names=tuple(work.replaced_names),
        actions=work.actions(),
    )


class _Filler:
    """Walks the trees of checkpoint and state side by side, and plans what to fill and what to do after."""

    def __init__(self, work: RestoreWork) -> None:
        self.work = work
        self.choices = work.choices
        self.report = work.report
        self.builder = work.builder
        self.matcher = work.matcher

    def top(self, state: Mapping[Any, object], tree: MapNode) -> None:
        random = [n for _, n in tree.entries if isinstance(n, RandomNode)]
        if random and rng.ENTRY not in state and self.choices.has(rng.ENTRY):
            make = self.builder.prepare(random[0], CPU)
            self.work.final_actions.append(lambda: rng.apply(make()))
        self._mapping(tree, state, "")

    def visit(self, node: Node, live: Any, set_value: Setter, name: str) -> None:
        """Restore ``node`` into ``live``, the state's object under ``name``; ``set_value`` replaces the object."""
        if not self.choices.selects_at_or_below(name):
            return
        live, set_value = self._open(node, live, set_value)
        match node:
            case TensorNode() | PiecesNode() if isinstance(live, LocalBlocks):
                self._blocks(node, live, name)
            case _ if isinstance(node, TENSORS):
                self._tensor(node, live, set_value, name)
            case ValueNode() | CodecNode():
                self._value(node, live, set_value, name)
            case MapNode() if _is_of_kind(live, node):
                self._mapping(node, live, name)
            case SequenceNode() if _is_of_kind(live, node):
                self._sequence(node, live, set_value, name)
            case ModuleNode() if isinstance(live, nn.Module):
                ModuleFiller(self.work, node, live, name).plan()
            case ObjectNode() | OptimizerNode() if is_stateful(live):
                self._stateful(node, live, name)
            case _:
                self._mismatch(node, live, name)

    def _open(self, node: Node, live: Any, set_value: Setter) -> tuple[Any, Setter]:
        """Return the value of a wrapper, and a function that replaces it; in place of an empty value, a container of
        the checkpoint's kind."""
        if type(live) is Item:
            live, set_value = _open_item(live)
        is_container = isinstance(node, MapNode | SequenceNode)
        if not is_container or _is_of_kind(live, node) or not _is_empty(live):
            return live, set_value
        if isinstance(node, SequenceNode) and node.is_tuple:
            return (), set_value
        made: Any = value_codec.MAPPING_TYPES[node.kind]() if isinstance(node, MapNode) else []
        self.work.assignments.append(lambda: set_value(made))
        return made, set_value

    def _stateful(self, node: ObjectNode | OptimizerNode, live: Any, name: str) -> None:
        if not self._is_of_type(live, name):
            return
        self.work.note_object(live, name, self._content(node))
        match node, live:
            case OptimizerNode(), Optimizer() if optimizers.is_stock(live):
                OptimizerFiller(self.work, node, live, name).plan()
            case _:
                self._object(node, live, name)

    def _content(self, node: Node) -> list[object]:
        """Return what tells the stored states of two objects apart, without their bytes: an optimizer has its tensors
        under all names, another object may make them anew for each."""
        tensors, values = self.work.header.tensors, self.work.header.values
        found: list[object] = []
        for each in walk(node):
            if isinstance(each, ValueNode):
                found.append(values[each.number])
            elif isinstance(node, OptimizerNode):
                found += each.own_positions()
            else:
                found += [(tensors[p].dtype, tensors[p].shape) for p in each.own_positions()]
        return found

    def _is_of_type(self, live: object, name: str) -> bool:
        """Return whether an object is of the class that was saved; report it where it is not."""
        stored = self.work.header.types.get(name)
        if stored is None or stored == type_name(live) or name in (self.choices.retype or ()):
            return True
        self.report.refuses(
            name,
            f"the checkpoint has the state of {with_article(stored)}, the state has {with_article(type_name(live))}; "
            f"retype=[{name!r}] restores it nevertheless, skip=[{name!r}] leaves it unchanged",
        )
        return False

    def _mismatch(self, node: Node, live: Any, name: str) -> None:
        if isinstance(node, KeptNode) or self._is_state_dict(live, name):
            return
        if isinstance(node, MapNode) and is_stateful(live):
            self._refuse_dict(live, name)
        elif isinstance(node, ConflictNode):
            advice = advice_for_ranks(name, in_blocks=node.in_blocks)
            self.report.refuses(name, f"{node.reason}; {advice}")
        elif live is None and not isinstance(node, RandomNode):
            self.work.absent(node, name)  # no object is made
        else:
            self.report.differs(name, _kind(node), _kind_of_live(live))

    def _refuse_dict(self, live: Any, name: str) -> None:
        self.report.refuses(
            name,
            f"the checkpoint has a dict, such as a state_dict(), the state has {with_article(type_name(live))}: "
            "read the checkpoint with tierfall.load() and call load_state_dict()",
        )

    def _refuse_plain(self, node: ValueNode | CodecNode, live: Any, name: str) -> None:
        """Report a plain value of the checkpoint under the name of a tensor or an object."""
        stored = plain_value(self.work.header, node) if isinstance(node, ValueNode) else None
        if type(stored) in value_codec.MAPPINGS and is_stateful(live):
            self._refuse_dict(live, name)
        else:
            self.report.differs(name, "a plain value", _kind_of_live(live))

    def _mapping(self, node: MapNode, live: Mapping[Any, Any], name: str) -> None:
        if self._is_state_dict(live, name):
            return
        stored = dict(node.entries)
        lost = lost_entries(live)
        for key, value in live.items():
            below = names.join(name, names.component(key))
            if key in lost and self.choices.selects_at_or_below(below):
                self.report.refuses(
                    below,
                    "is an entry of a module's state_dict() that does not share memory with the module: restoring into "
                    "it would not change the module; put the module itself into the state",
                )
            elif key in stored:
                set_item = self._item_setter(live, key, below)
                self.visit(stored[key], value, set_item, below)
            else:
                self.work.extra(value, below)
        missing = [(key, child) for key, child in node.entries if key not in live]
        # A state_dict() of a module that has no tensors would take them, and the module would not.
        takes = bool(name and missing) and not (hasattr(live, "_metadata") or holds_tensors(live))
        for key, child in missing:
            below = names.join(name, names.component(key))
            if type(key) is UnknownValue:
                self.report.refuses(below, f"the checkpoint has a key of {key.name}: {key.reason}")
            elif takes:
                self.visit(child, None, self._item_setter(live, key, below), below)
            else:
                self.work.absent(child, below)

    def _item_setter(self, live: Any, key: Any, name: str) -> Setter:
        def set_item(value: object) -> None:
            if key in live and value is live[key]:
                return
            if not isinstance(live, MutableMapping):
                raise RestoreError(
                    f"restore: {name} cannot be restored, since {type(live).__name__} is read-only; pass a dict"
                )
            live[key] = value

        return set_item

    def _sequence(self, node: SequenceNode, live: Any, set_value: Setter, name: str) -> None:
        items = list(live) if node.is_tuple else live
        missing = len(node.nodes) - len(live)
        values = [*live]
        if missing > 0 and not holds_tensors(live):
            values += [None] * missing
            self.work.assignments.append(lambda: items.extend([None] * missing))
        for index, (child, value) in enumerate(zip(node.nodes, values, strict=False)):

            def set_element(value: object, index: int = index) -> None:
                items[index] = value

            self.visit(child, value, set_element, f"{name}.{index}")
        for index in range(len(values), len(node.nodes)):
            self.work.absent(node.nodes[index], f"{name}.{index}")
        for index in range(len(node.nodes), len(live)):
            self.work.extra(live[index], f"{name}.{index}")
        if node.is_tuple:
            # A tuple is replaced only where one of its elements could not be changed in place.
            self.work.assignments.append(
                lambda: None if _same(items, live) else set_value(tuple(items))
            )

    def _tensor(self, node: Node, live: Any, set_value: Setter, name: str) -> None:
        if not isinstance(live, torch.Tensor):
            if not _is_empty(live):
                self.report.differs(name, _kind(node), with_article(type(live).__qualname__))
            elif self._is_block(node):
                self.report.refuses(
                    name,
                    "the checkpoint has a sharded tensor: put one that is sharded like it there first",
                )
            else:
                make = self.builder.prepare(node, CPU, name)
                self.work.assignments.append(lambda: set_value(make()))
            return
        if isinstance(live, nn.Parameter):
            self.work.filled_parameters.append(live)
        self.matcher.fill(node, live, name)

    def _blocks(self, node: TensorNode | PiecesNode, live: LocalBlocks, name: str) -> None:
        """Fill this rank's blocks of a tensor: from its image, if that has equal blocks; else each with its region."""
        stored = {self.work.header.tensors[at].piece: at for at in node.own_positions()}
        if live.parts and not stored:
            self.report.refuses(name, "has a block in the state, and none in the checkpoint")
            return
        for part in live.parts:
            if isinstance(part[0], nn.Parameter):
                self.work.filled_parameters.append(part[0])
            at = stored.get(part[1], min(stored.values()))
            self.matcher.tensor(at, LocalBlocks((part,)), name)

    def _is_block(self, node: Node) -> bool:
        """Return whether an image has only a block of a tensor."""
        stored = (self.work.header.tensors[position] for position in positions_of(node))
        return any(tensor.shape != tensor.whole_shape for tensor in stored)

    def _value(self, node: ValueNode | CodecNode, live: Any, set_value: Setter, name: str) -> None:
        if isinstance(live, (torch.Tensor, nn.Module, LocalBlocks)) or is_stateful(live):
            self._refuse_plain(node, live, name)
            return
        reported = [self._is_state_dict(each, below) for below, each in visit_state(live, name)]
        if any(reported):
            return
        ValueFiller(self.work, node, live, set_value, name).plan()

    # ---- objects with a state_dict

    def _object(self, node: Node, live: Any, name: str) -> None:
        if not self.choices.has(name):
            self.report.differs(
                name, "a part that was selected", "an object that is only restored as a whole"
            )
            return
        if isinstance(live, torch.amp.GradScaler) and live.is_enabled() and self._is_empty(node):
            self.report.refuses(
                name,
                f"the checkpoint has a scaler that was disabled; skip=[{name!r}] starts with a new one",
            )
            return
        make = self.builder.prepare(node, CPU)
        self.work.state_loads.append(lambda: load_state_dict(live, make(), name))
        if type(live).__module__.startswith("torchdata.stateful_dataloader"):
            # state_dict creates its iterator now. In the training loop that would draw from the random state, which is
            # set after this.
            self.work.state_loads.append(live.state_dict)

    def _is_empty(self, node: Node) -> bool:
        """Return whether an object's saved state is an empty dict."""
        inner = node.state if isinstance(node, ObjectNode) else None
        return isinstance(inner, ValueNode) and plain_value(self.work.header, inner) == {}

    def _is_state_dict(self, live: Any, name: str) -> bool:
        """Return whether a dict is what an object's state_dict() returned; report it where it is."""
        kind = state_dict_of(live)
        if kind is None:
            return False
        self.report.refuses(
            name,
            f"is the state_dict() of {kind}: restoring into it would not change the {kind.split()[-1]}; put the object "
            "itself into the state, or read the checkpoint with tierfall.load() and call load_state_dict()",
        )
        return True


def _open_item(holder: Item) -> tuple[Any, Setter]:
    """Return the value of a wrapper, and a function that replaces it."""
    while type(holder.value) is Item:
        holder = holder.value

    def set_item(value: object) -> None:
        holder.value = value

    return holder.value, set_item


def load_state_dict(live: Any, built: Any, name: str) -> None:
    try:
        live.load_state_dict(built)
    except Exception as error:
        raise RestoreError(f"restore: load_state_dict of {name} failed: {error}") from error


def _same(items: Sequence[object], live: Sequence[object]) -> bool:
    return [*map(id, items)] == [*map(id, live)]


def _is_empty(live: object) -> bool:
    """Return whether a place of the state holds nothing, so that it takes what the checkpoint has there."""
    return live is None or (type(live) in (list, tuple, *value_codec.MAPPINGS) and not live)


def _is_of_kind(live: object, node: Node) -> bool:
    """Return whether a value is a container of the checkpoint's kind."""
    if isinstance(node, SequenceNode):
        return type(live) is (tuple if node.is_tuple else list)
    return isinstance(node, MapNode) and type(live) in value_codec.MAPPINGS


def _kind_of_live(live: object) -> str:
    is_block = isinstance(live, LocalBlocks)
    return "blocks of a tensor" if is_block else with_article(type(live).__qualname__)


def _kind(node: Node) -> str:
    match node:
        case _ if isinstance(node, TENSORS):
            return "a tensor"
        case MapNode():
            return f"{with_article(node.kind)} that holds tensors"
        case SequenceNode():
            return f"a {'tuple' if node.is_tuple else 'list'} that holds tensors"
        case ModuleNode():
            return "a module (put the module itself into the state)"
        case OptimizerNode():
            return "an optimizer (put the optimizer itself into the state)"
        case RandomNode():
            return "the random state of the process (give your own entry another name)"
        case _:
            return "an object with load_state_dict (put the object itself into the state)"
