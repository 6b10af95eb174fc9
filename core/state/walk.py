"""One walk of a state: every tensor once, every value written down, and the tree that holds them.

The walk fixes values at its moment and refuses, naming the path, what cannot be saved. It decides nothing about where
bytes lie (``layout``) and copies no tensor. What it finds is in ``view``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from tierfall.core.state import modules, optimizers
from tierfall.core.state.item import Item, OnResize
from tierfall.core.state.modules import Scans
from tierfall.core.state.placement import TensorIntake
from tierfall.core.state.unsupported import call_of_user, refuse
from tierfall.core.state.view import NO_OWNER, UNSHARED, Node, StateView
from tierfall.core.state.walk_cache import WalkCache, take_fingerprints
from tierfall.core.tensors import names as naming
from tierfall.core.tensors import numpy_values, rng, tensors, value_codec
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, any_sharded, is_sharded
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.text import with_article

T = TypeVar("T")


def walk_state(
    state: Mapping[Any, object], recall: WalkCache | None = None, *, with_random: bool = True
) -> StateView:
    """Walk a state; CaptureError, naming the path, where something in it cannot be saved.

    ``recall`` is what earlier walks of this state left, and what this one leaves; ``with_random`` adds the random state
    where the state does not name it itself.
    """
    if not isinstance(state, Mapping):
        raise CaptureError(
            f"save: state is {with_article(type(state).__name__)}; expected a mapping of names to what is to be saved"
        )
    recall = WalkCache() if recall is None else recall
    scans = modules.scan_state(state, recall.trees)
    walk = _Walk(scans, recall)
    tree = walk.state(state, with_random=with_random)
    walk.end()
    table = walk.table
    names, dtypes, shapes, changes, owners, trails, plain, strides, pieces = table.finish()
    return StateView(
        names=names,
        sources=table.tensors,
        pointers=table.pointers,
        changes=changes,
        owners=owners,
        trails=trails,
        plain=plain,
        strides=strides,
        parameters=scans.parameters,
        optimizers=tuple(walk.optimizers),
        tree=tree,
        dtypes=dtypes,
        shapes=shapes,
        pieces=pieces,
        values=walk.values,
        rules=walk.rules,
        types=walk.types,
        structure=(tree, names, dtypes, shapes, pieces, strides, walk.types),
    )


class _PlainValue:
    """A value that holds no tensors, written down, and its blobs, still without numbers."""

    __slots__ = ("blobs", "coded")

    def __init__(self, coded: Coded, blobs: Sequence[tuple[dict[str, Any], int]] = ()) -> None:
        self.coded = coded
        self.blobs = blobs


_SCALARS = frozenset({int, float, bool, type(None)})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})


class _Walk:
    def __init__(self, scans: Scans, recall: WalkCache) -> None:
        self.scans = scans
        self._recall = recall
        self._recalled: set[str] = set()
        self._numberings: dict[str, optimizers.Numbering] = {}
        self.values: list[Coded] = []
        self.taking = TensorIntake(self.values, recall)
        self.table = self.taking.table
        self.rules: dict[str, OnResize] = {}
        self.types: dict[str, str] = {}
        self.optimizers: list[Optimizer] = []
        self._ancestors: set[int] = set()

    def end(self) -> None:
        self._recall.forget_others(self._recalled)
        self._recall.numberings = self._numberings

    def state(self, state: Mapping[Any, object], *, with_random: bool) -> Node:
        keys, nodes = [], []
        for key, value in state.items():
            trail = (None, key)
            keys.append(self._key(key, trail))
            nodes.append(self._settle(self._walk(value, naming.part(key), trail, 0)))
        if with_random and rng.ENTRY not in state:
            keys.append(rng.ENTRY)
            found = self._walk(rng.capture(), rng.ENTRY, (None, "rng"), 0)
            nodes.append(("r", self._settle(found)))
        return ("d", "dict", tuple(keys), tuple(nodes))

    # ---- dispatch

    def _walk(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _PlainValue:
        kind = type(value)
        if kind in _TENSORS:
            return self.taking.tensor(value, name, trail)
        if kind in _SCALARS:
            return _PlainValue(value_codec.encode_atom(value))
        if kind is str or kind is bytes:
            return self._text(value, name, trail)
        if depth > value_codec.DEPTH_MAX:
            refuse(trail, f"is nested deeper than {value_codec.DEPTH_MAX} levels")
        if kind is tuple or kind is list or kind in value_codec.MAPPINGS:
            return self._container(value, name, trail, depth)
        registered = value_codec.codec_for(kind)
        if registered is not None:
            return self._registered(registered, value, name, trail, depth)
        return self._object(value, name, trail, depth)

    def _object(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _PlainValue:
        if isinstance(value, Item):
            return self._item(value, name, trail, depth)
        if isinstance(value, LocalBlocks | Branch):
            return self._in_parts(value, name, trail, depth)
        if isinstance(value, nn.Module):
            return self._within(value, trail, lambda: self._module(value, name, trail, depth))
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            if optimizers.is_stock(value):
                return self._within(
                    value, trail, lambda: self._optimizer(value, name, trail, depth)
                )
        if isinstance(value, torch.Tensor):
            return self.taking.tensor(value, name, trail)
        if isinstance(value, torch.Generator):
            return self._generator(value, name, trail)
        if numpy_values.is_array(value):
            return self._array(value, name, trail)
        if is_stateful(value):
            return self._within(value, trail, lambda: self._stateful(value, name, trail, depth))
        return _PlainValue(self._atom(value, trail))

    def _within(self, value: object, trail: Trail, visit: Callable[[], T]) -> T:
        if id(value) in self._ancestors:
            refuse(trail, "contains itself")
        self._ancestors.add(id(value))
        try:
            return visit()
        finally:
            self._ancestors.discard(id(value))

    def _settle(self, found: Node | _PlainValue) -> Node:
        """Give a value its number, where its container holds tensors and so is not a value itself."""
        if type(found) is not _PlainValue:
            return found
        for number, (members, _) in enumerate(found.blobs):
            members["t"] = number
        self.values.append(found.coded)
        return ("v", len(self.values) - 1, *[source for _, source in found.blobs])

    # ---- values

    def _atom(self, value: object, trail: Trail) -> Coded:
        try:
            return value_codec.encode_atom(value)
        except value_codec.NotEncodableError as error:
            refuse(trail, f"cannot be saved: {error}; {_ADVICE}")

    def _key(self, key: object, trail: Trail) -> str | tuple[str]:
        if type(key) is str:
            return key
        return (json.dumps(self._atom(key, trail), separators=(",", ":")),)

    def _text(self, value: str | bytes, name: str, trail: Trail) -> _PlainValue:
        if len(value) <= value_codec.BLOB_BYTES // 4:
            return _PlainValue(value_codec.encode_atom(value))
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if len(data) <= value_codec.BLOB_BYTES:
            return _PlainValue(value_codec.encode_atom(value))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._blob(flat, "str" if isinstance(value, str) else "bytes", name, trail)

    def _blob(
        self, flat: torch.Tensor, kind: str, name: str, trail: Trail, **members: Coded
    ) -> _PlainValue:
        coded = {value_codec.TAG: "blob", "k": kind, "t": 0, **members}
        return _PlainValue(
            coded, [(coded, self.taking.add(flat, flat.dtype, tuple(flat.shape), name, trail))]
        )

    def _array(self, value: Any, name: str, trail: Trail) -> _PlainValue:
        reason = numpy_values.why_not(value)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}; save it as plain numbers or text")
        source = numpy_values.to_tensor(value)
        members = {"d": value.dtype.str, "s": list(value.shape)}
        return self._blob(source, "array", name, trail, **members)

    def _generator(self, value: torch.Generator, name: str, trail: Trail) -> _PlainValue:
        return self._blob(value.get_state(), "generator", name, trail, d=str(value.device))

    def _registered(
        self, registered: value_codec.ValueCodec, value: object, name: str, trail: Trail, depth: int
    ) -> Node | _PlainValue:
        def encoded() -> Node | _PlainValue:
            inner = call_of_user(
                lambda: registered.encode(value), f"codec {registered.name!r}", trail
            )
            return self._walk(inner, name, trail, depth + 1)

        found = self._within(value, trail, encoded)
        if type(found) is not _PlainValue:
            return ("c", registered.name, found)
        return _PlainValue(
            {value_codec.TAG: "codec", "n": registered.name, "v": found.coded}, found.blobs
        )

    # ---- containers

    def _container(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _PlainValue:
        if type(value) is list:
            run = value_codec.encode_run(value)
            if run is not None:
                return _PlainValue(run)
        return self._within(value, trail, lambda: self._children(value, name, trail, depth))

    def _children(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _PlainValue:
        if type(value) is list or type(value) is tuple:
            found = [
                self._walk(child, f"{name}.{i}", (trail, i), depth + 1)
                for i, child in enumerate(value)
            ]
            if _all_plain(found):
                coded = [child.coded for child in found]
                return _join(
                    coded if type(value) is list else value_codec.tagged("tuple", coded), found
                )
            return ("l" if type(value) is list else "t", tuple(map(self._settle, found)))
        kind = value_codec.MAPPINGS[type(value)]
        keys = [self._key(key, (trail, key)) for key in value]
        found = [
            self._walk(child, f"{name}.{naming.part(key)}", (trail, key), depth + 1)
            for key, child in value.items()
        ]
        if _all_plain(found):
            return _join(
                value_codec.encode_items(kind, list(value), [c.coded for c in found]), found
            )
        return ("d", kind, tuple(keys), tuple(map(self._settle, found)))

    def _item(self, value: Item, name: str, trail: Trail, depth: int) -> Node | _PlainValue:
        outer = self.taking.ruled
        self.taking.ruled = value.changes or outer
        if value.on_resize is not OnResize.RESHARD:
            self.rules[name] = value.on_resize
        try:
            return self._within(
                value, trail, lambda: self._walk(value.value, name, trail, depth + 1)
            )
        finally:
            self.taking.ruled = outer

    def _in_parts(self, value: LocalBlocks | Branch, name: str, trail: Trail, depth: int) -> Node:
        if isinstance(value, LocalBlocks):
            return self.taking.blocks(value, name, trail)
        nodes = [
            self._settle(self._walk(child, f"{name}.{naming.part(key)}", (trail, key), depth + 1))
            for key, child in value.items()
        ]
        keys = tuple(self._key(key, (trail, key)) for key in value)
        return ("d", "dict", keys, tuple(nodes))

    # ---- what has a state_dict

    def _module(self, module: nn.Module, name: str, trail: Trail, depth: int) -> Node:
        tree, known = self.scans.tree(module, name)
        if tree is not None and known is not None:
            node = self._cached_tree(tree, known, name)
            if node is not None:
                return node
        scan = self.scans.of(module, name)
        if scan.refused is not None:
            refuse(trail, scan.refused)
        state = call_of_user(module.state_dict, "state_dict()", trail)
        if not isinstance(state, Mapping) or not _all_str(state):
            refuse(
                trail, f"has a state_dict() that is not a mapping of str: {type(state).__name__}"
            )
        keys = tuple(state)
        about = ("module", keys, scan.signature(), self.taking.ruled, self.taking.owner)
        owners = scan.owners_of(state)
        made = [key for key, owner in zip(keys, owners, strict=True) if owner == NO_OWNER]
        if alone := tensors.unshared(state, made):
            owners = [UNSHARED if key in alone else o for key, o in zip(keys, owners, strict=True)]
        met = list(state.values())
        if any_sharded(met):
            met, about = self.taking.local_parts(met, about, trail)
        node = self._cached_or(
            name,
            about,
            met,
            owners,
            lambda: self._walk_module(scan, state, owners, name, trail, depth),
        )
        if tree is not None and self._recall.part(name) is not None:
            known = modules.know(scan, tree, keys, self.taking.ruled)
            if known is not None:
                self._recall.trees[name] = known
        return node

    def _cached_tree(
        self, tree: modules.ModuleTree, known: modules.KnownModuleTree, name: str
    ) -> Node | None:
        """Return the node that stood for a tree of the same shape at the last walk, if its tensors are what they were;
        its state_dict need not be asked for them."""
        part = self._recall.part(name)
        if part is None or known.ruled is not self.taking.ruled:
            return None
        entries = [tree.tensors[at] for at in known.entries_at]
        met = [*map(torch.Tensor.detach, entries)]  # type: ignore[arg-type]
        owners = [*map(id, entries)]
        for place in known.buffers:
            owners[place] = NO_OWNER
        looks, first = take_fingerprints(met), len(self.table.tensors)
        if looks is None or not part.is_again(first, part.about, owners, looks):
            return None
        if not self.table.take(part, met):
            return None
        self._recalled.add(name)
        return part.node

    def _cached_or(
        self,
        name: str,
        about: tuple[Any, ...],
        met: list[Any],
        owners: list[int],
        walk: Callable[[], Node],
    ) -> Node:
        """Return the node that stood for these tensors at the last walk, or walk them and remember it."""
        first = len(self.table.tensors)
        part = self._recall.part(name)
        self._recalled.add(name)
        looks = take_fingerprints(met) if part is not None else None
        if part is not None and looks is not None:
            again = part.is_again(first, about, owners, looks)
            if again and self.table.take(part, met):
                return part.node
        values = len(self.values)
        node = walk()
        known = None
        if len(self.values) == values:
            known = self.table.part(first, about, owners, met, node)
        self._recall.keep(name, known)
        return node

    def _walk_module(
        self,
        scan: modules.ModuleScan,
        state: Mapping[str, Any],
        owners: Sequence[int],
        name: str,
        trail: Trail,
        depth: int,
    ) -> Node:
        keys = tuple(state)
        names = tuple(map(scan.key_name, keys))
        nodes = []
        for key, below, value, owner in zip(keys, names, state.values(), owners, strict=True):
            if type(value) is torch.Tensor or is_sharded(value):
                node = self.taking.tensor(value, f"{name}.{below}", (trail, key), owner=owner)
            else:
                found = self._walk(value, f"{name}.{below}", (trail, key), depth + 1)
                node = self._settle(found)
            nodes.append(node)
        return ("m", keys, () if names == keys else names, tuple(nodes))

    def _optimizer(self, optimizer: Optimizer, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(optimizer)
        before = self._recall.numberings.get(name)
        numbering = optimizers.numbering(optimizer, self.scans, before)
        self._numberings[name] = replace(numbering, parameters=())
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            place = ((trail, "param_groups"), index)
            values = optimizers.group_values(group)
            found = self._walk(values, f"{name}.param_groups.{index}", place, depth + 1)
            groups.append((numbering.groups[index], self._settle(found)))
        state = self._states(optimizer, numbering, f"{name}.state", (trail, "state"), depth)
        return ("o", numbering.names, tuple(groups), state)

    def _states(
        self,
        optimizer: Optimizer,
        numbering: optimizers.Numbering,
        name: str,
        trail: Trail,
        depth: int,
    ) -> Node:
        """The state of each parameter; most often a dict of tensors each, the same as at the last walk."""
        state: Mapping[Any, Any] = optimizer.state

        def anew() -> Node:
            return tuple(
                self._optimizer_state(key, value, numbering, name, trail, depth)
                for key, value in state.items()
            )

        held = state.values()
        if not set(map(type, held)) <= {dict}:
            return anew()
        keys = [*chain.from_iterable(held)]
        numbers = [*map(numbering.numbers.get, map(id, state))]
        if not _all_str(keys) or None in numbers:
            return anew()
        about = ("optimizer", numbering.names, numbers, [*map(len, held)], keys, self.taking.ruled)
        met = [*chain.from_iterable(map(dict.values, held))]
        owners = [*chain.from_iterable(map(repeat, map(id, state), map(len, held)))]
        if any_sharded(met):
            met, about = self.taking.local_parts(met, about, trail)
        return self._cached_or(name, about, met, owners, anew)

    def _optimizer_state(
        self,
        key: Any,
        value: Any,
        numbering: optimizers.Numbering,
        name: str,
        trail: Trail,
        depth: int,
    ) -> tuple[Any, Node]:
        if not isinstance(key, torch.Tensor):
            place = (trail, key)
            token = self._key(key, place)
            owner = id(numbering.parameters[0]) if numbering.parameters else NO_OWNER
            found = self._owned(value, owner, f"{name}.{naming.part(key)}", place, depth)
            return ((token,), self._settle(found))
        number = numbering.numbers.get(id(key))
        if number is None:
            refuse(trail, "holds the state of a parameter that is in none of its groups")
        below = f"{name}.{numbering.part(number)}"
        return (number, self._settle(self._owned(value, id(key), below, (trail, number), depth)))

    def _owned(
        self, value: Any, owner: int, name: str, trail: Trail, depth: int
    ) -> Node | _PlainValue:
        """Walk what an optimizer keeps of one parameter."""
        outer, self.taking.owner = self.taking.owner, owner
        try:
            return self._walk(value, name, trail, depth + 1)
        finally:
            self.taking.owner = outer

    def _stateful(self, value: Any, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(value)
        if self.types[name] == "ZeroRedundancyOptimizer":
            refuse(
                trail,
                "is a ZeroRedundancyOptimizer, each rank of which has the state of some parameters alone and does not "
                "say which; shard by torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        state = call_of_user(value.state_dict, "state_dict()", trail)
        return ("s", self._settle(self._walk(state, name, trail, depth + 1)))


_ADVICE = "save what it is made of, give it state_dict and load_state_dict, or teach tierfall with register_codec"


def is_stateful(value: object) -> bool:
    """Say whether an object tells its state through state_dict and load_state_dict."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def type_name(value: object) -> str:
    """Name the class of an object, and of the schedulers in one; where it is defined may change from version to
    version."""
    name = type(value).__name__
    if isinstance(value, ChainedScheduler | SequentialLR):
        return f"{name}({', '.join(map(type_name, value._schedulers))})"
    return name


def _all_str(keys: Iterable[object]) -> bool:
    return set(map(type, keys)) <= {str}


def _all_plain(found: list[Any]) -> bool:
    return all(type(child) is _PlainValue for child in found)


def _join(coded: Coded, found: list[_PlainValue]) -> _PlainValue:
    return _PlainValue(coded, [blob for child in found for blob in child.blobs])
