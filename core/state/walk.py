"""The walk of a state: collects every tensor once, encodes every value, and builds the tree of containers.

Values are fixed at the time of the walk. What cannot be saved is refused with its path. The walk assigns no offsets
(``core.image.layout`` does) and copies no tensor. Its result is a ``StateView`` (``view``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.state import modules, optimizers
from tierfall.core.state.item import Item, OnResize
from tierfall.core.state.leaves import Leaves, PlainValue, call_user_code, refuse
from tierfall.core.state.modules import KnownModuleTree, ModuleTree, Scans
from tierfall.core.state.state_dicts import is_stateful, object_state, type_name
from tierfall.core.state.view import NO_OWNER, UNSHARED, Node, StateView
from tierfall.core.state.walk_cache import WalkCache, take_fingerprints
from tierfall.core.tensors import names as naming
from tierfall.core.tensors import numpy_values, rng, tensors, value_codec
from tierfall.core.tensors.builtin_codecs import ValueCodec
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, any_sharded, is_sharded
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.wrappers import is_wrapper
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.text import with_article

T = TypeVar("T")


def walk_state(
    state: Mapping[Any, object], cache: WalkCache | None = None, *, with_random: bool = True
) -> StateView:
    """Walk a state; CaptureError with the path of an entry that cannot be saved.

    ``cache`` has the results of the previous walk of this state, and is updated. ``with_random`` adds the process's
    random state, unless the state has an entry of that name.
    """
    if not isinstance(state, Mapping):
        raise CaptureError(
            f"save: state is {with_article(type(state).__name__)}; expected a mapping of names to objects"
        )
    cache = WalkCache() if cache is None else cache
    scans = modules.scan_state(state, cache.trees)
    walk = _Walk(scans, cache)
    tree = walk.state(state, with_random=with_random)
    walk.finish()
    table = walk.table
    rows = table.finish()
    kinds = (rows.names, rows.dtypes, rows.shapes, rows.block_positions, rows.strides)
    return StateView(
        **rows._asdict(),
        sources=table.tensors,
        pointers=table.pointers,
        parameters=scans.parameters,
        optimizers=tuple(walk.optimizers),
        tree=tree,
        values=walk.values,
        rules=walk.rules,
        types=walk.types,
        structure=(tree, *kinds, walk.types),
    )


_SCALARS = frozenset({int, float, bool, type(None)})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})


class _Walk:
    def __init__(self, scans: Scans, cache: WalkCache) -> None:
        self.scans = scans
        self._cache = cache
        self._used_names: set[str] = set()
        self._numberings: dict[str, optimizers.Numbering] = {}
        self.leaves = Leaves(cache)
        self.table = self.leaves.table
        self.values = self.leaves.values
        self.rules: dict[str, OnResize] = {}
        self.types: dict[str, str] = {}
        self.optimizers: list[Optimizer] = []
        self._ancestors: set[int] = set()

    def finish(self) -> None:
        self._cache.forget_others(self._used_names)
        self._cache.numberings = self._numberings

    def state(self, state: Mapping[Any, object], *, with_random: bool) -> Node:
        keys, nodes = [], []
        for key, value in state.items():
            trail = (None, key)
            keys.append(self.leaves.key(key, trail))
            nodes.append(self.leaves.to_node(self._walk(value, naming.component(key), trail, 0)))
        if with_random and rng.ENTRY not in state:
            keys.append(rng.ENTRY)
            found = self._walk(rng.capture(), rng.ENTRY, (None, "rng"), 0)
            nodes.append(("r", self.leaves.to_node(found)))
        return ("d", "dict", tuple(keys), tuple(nodes))

    # ---- dispatch

    def _walk(self, value: Any, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        kind = type(value)
        if kind in _TENSORS:
            return self.leaves.tensor(value, name, trail)
        if kind in _SCALARS:
            return PlainValue(value_codec.encode_atom(value))
        if kind is str or kind is bytes:
            return self.leaves.text(value, name, trail)
        if depth > value_codec.DEPTH_MAX:
            refuse(trail, f"is nested deeper than {value_codec.DEPTH_MAX} levels")
        if kind in (tuple, list, Branch) or kind in value_codec.MAPPINGS:
            return self._container(value, name, trail, depth)
        registered = value_codec.codec_for(kind)
        if registered is not None:
            return self._registered(registered, value, name, trail, depth)
        return self._object(value, name, trail, depth)

    def _object(self, value: Any, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        if isinstance(value, Item):
            return self._item(value, name, trail, depth)
        if isinstance(value, LocalBlocks):
            return self.leaves.blocks(value, name, trail)
        if isinstance(value, nn.Module):
            return self._guard_cycle(value, trail, lambda: self._module(value, name, trail, depth))
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            if optimizers.is_stock(value):
                return self._guard_cycle(
                    value, trail, lambda: self._optimizer(value, name, trail, depth)
                )
        if isinstance(value, torch.Tensor):
            return self.leaves.tensor(value, name, trail)
        if isinstance(value, torch.Generator):
            return self.leaves.generator(value, name, trail)
        if numpy_values.is_array(value):
            return self.leaves.array(value, name, trail)
        if is_stateful(value):
            return self._guard_cycle(
                value, trail, lambda: self._stateful(value, name, trail, depth)
            )
        return self._value(value, name, trail, depth)

    def _value(self, value: object, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        builtin = self.leaves.builtin_codec(value, trail)
        if builtin is None:
            return PlainValue(self.leaves.atom(value, trail))
        return self._registered(builtin, value, name, trail, depth)

    def _guard_cycle(self, value: object, trail: Trail, visit: Callable[[], T]) -> T:
        if id(value) in self._ancestors:
            refuse(trail, "contains itself")
        self._ancestors.add(id(value))
        try:
            return visit()
        finally:
            self._ancestors.discard(id(value))

    def _registered(
        self, registered: ValueCodec, value: object, name: str, trail: Trail, depth: int
    ) -> Node | PlainValue:
        def encoded() -> Node | PlainValue:
            inner = call_user_code(
                lambda: registered.encode(value), f"codec {registered.name!r}", trail
            )
            return self._walk(inner, name, trail, depth + 1)

        found = self._guard_cycle(value, trail, encoded)
        if type(found) is not PlainValue:
            return ("c", registered.name, found)
        return PlainValue(
            {value_codec.TAG: "codec", "n": registered.name, "v": found.coded}, found.blobs
        )

    # ---- containers

    def _container(self, value: Any, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        if type(value) is list:
            run = value_codec.encode_run(value)
            if run is not None:
                return PlainValue(run)
        return self._guard_cycle(value, trail, lambda: self._children(value, name, trail, depth))

    def _children(self, value: Any, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        if type(value) is list or type(value) is tuple:
            found = [
                self._walk(child, f"{name}.{i}", (trail, i), depth + 1)
                for i, child in enumerate(value)
            ]
            if PlainValue.are(found):
                coded = [child.coded for child in found]
                return PlainValue.join(
                    coded if type(value) is list else value_codec.tagged("tuple", coded), found
                )
            return ("l" if type(value) is list else "t", tuple(map(self.leaves.to_node, found)))
        kind = value_codec.MAPPINGS.get(type(value), "dict")  # a Branch
        keys = [self.leaves.key(key, (trail, key)) for key in value]
        found = [
            self._walk(child, f"{name}.{naming.component(key)}", (trail, key), depth + 1)
            for key, child in value.items()
        ]
        if type(value) is not Branch and PlainValue.are(found):
            return PlainValue.join(
                value_codec.encode_items(kind, list(value), [c.coded for c in found]), found
            )
        return ("d", kind, tuple(keys), tuple(map(self.leaves.to_node, found)))

    def _item(self, value: Item, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        outer = self.leaves.declared
        self.leaves.declared = value.changes or outer
        if value.on_resize is not OnResize.RESHARD:
            self.rules[name] = value.on_resize
        try:
            return self._guard_cycle(
                value, trail, lambda: self._walk(value.value, name, trail, depth + 1)
            )
        finally:
            self.leaves.declared = outer

    # ---- objects with a state_dict

    def _module(self, module: nn.Module, name: str, trail: Trail, depth: int) -> Node:
        tree, known = self.scans.tree(module, name)
        if tree is not None and known is not None:
            node = self._cached_tree(tree, known, name)
            if node is not None:
                return node
        scan = self.scans.of(module, name)
        if scan.refused is not None:
            refuse(trail, scan.refused)
        state = call_user_code(module.state_dict, "state_dict()", trail)
        if not isinstance(state, Mapping) or not _all_str(state):
            refuse(
                trail, f"has a state_dict() that is not a mapping of str: {type(state).__name__}"
            )
        keys = tuple(state)
        cache_key = ("module", keys, scan.signature(), self.leaves.declared, self.leaves.owner)
        owners = scan.owners_of(state)
        made = [key for key, owner in zip(keys, owners, strict=True) if owner == NO_OWNER]
        if unshared := tensors.unshared(state, made):
            owners = [
                UNSHARED if key in unshared else o for key, o in zip(keys, owners, strict=True)
            ]
        entries = list(state.values())
        if any_sharded(entries):
            entries, cache_key = self.leaves.local_parts(entries, cache_key, trail)
        node = self._cached_or(
            name,
            cache_key,
            entries,
            owners,
            lambda: self._walk_module(scan, state, owners, name, trail, depth),
        )
        if tree is not None and self._cache.find(name) is not None:
            known = modules.describe_tree(scan, tree, keys, self.leaves.declared)
            if known is not None:
                self._cache.trees[name] = known
        return node

    def _cached_tree(self, tree: ModuleTree, known: KnownModuleTree, name: str) -> Node | None:
        """The node of the previous walk, if the tree has the same shape and the tensors the same fingerprints; spares
        the call of state_dict."""
        part = self._cache.find(name)
        if part is None or known.declared is not self.leaves.declared:
            return None
        sources = [tree.tensors[at] for at in known.entries_at]
        entries = [*map(torch.Tensor.detach, sources)]  # type: ignore[arg-type]
        owners = [*map(id, sources)]
        for place in known.buffers:
            owners[place] = NO_OWNER
        fingerprints, first = take_fingerprints(entries), len(self.table.tensors)
        if fingerprints is None or not part.matches(first, part.cache_key, owners, fingerprints):
            return None
        if not self.table.reuse(part, entries):
            return None
        self._used_names.add(name)
        return part.node

    def _cached_or(
        self,
        name: str,
        cache_key: tuple[Any, ...],
        entries: list[Any],
        owners: list[int],
        walk: Callable[[], Node],
    ) -> Node:
        """The node of the previous walk, if these tensors have the same fingerprints; else walk and cache them."""
        first = len(self.table.tensors)
        part = self._cache.find(name)
        self._used_names.add(name)
        fingerprints = take_fingerprints(entries) if part is not None else None
        if part is not None and fingerprints is not None:
            is_same = part.matches(first, cache_key, owners, fingerprints)
            if is_same and self.table.reuse(part, entries):
                return part.node
        values = len(self.values)
        node = walk()
        known = None
        if len(self.values) == values:
            known = self.table.cache_part(first, cache_key, owners, entries, node)
        self._cache.remember(name, known)
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
            if type(value) is torch.Tensor or is_sharded(value) or is_wrapper(value):
                node = self.leaves.tensor(value, f"{name}.{below}", (trail, key), owner=owner)
            else:
                found = self._walk(value, f"{name}.{below}", (trail, key), depth + 1)
                node = self.leaves.to_node(found)
            nodes.append(node)
        return ("m", keys, () if names == keys else names, tuple(nodes))

    def _optimizer(self, optimizer: Optimizer, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(optimizer)
        before = self._cache.numberings.get(name)
        numbering = optimizers.number_parameters(optimizer, self.scans, before)
        self._numberings[name] = replace(numbering, parameters=())
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            place = ((trail, "param_groups"), index)
            values = {key: value for key, value in group.items() if key != "params"}
            found = self._walk(values, f"{name}.param_groups.{index}", place, depth + 1)
            groups.append((numbering.groups[index], self.leaves.to_node(found)))
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
        """The state of each parameter: usually a dict of tensors each, equal to that of the previous walk."""
        state: Mapping[Any, Any] = optimizer.state

        def walk() -> Node:
            return tuple(
                self._optimizer_state(key, value, numbering, name, trail, depth)
                for key, value in state.items()
            )

        states = state.values()
        if not set(map(type, states)) <= {dict}:
            return walk()
        keys = [*chain.from_iterable(states)]
        numbers = [*map(numbering.numbers.get, map(id, state))]
        if not _all_str(keys) or None in numbers:
            return walk()
        lengths = [*map(len, states)]
        cache_key = ("optimizer", numbering.names, numbers, lengths, keys, self.leaves.declared)
        entries = [*chain.from_iterable(map(dict.values, states))]
        owners = [*chain.from_iterable(map(repeat, map(id, state), lengths))]
        if any_sharded(entries):
            entries, cache_key = self.leaves.local_parts(entries, cache_key, trail)
        return self._cached_or(name, cache_key, entries, owners, walk)

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
            token = self.leaves.key(key, place)
            owner = id(numbering.parameters[0]) if numbering.parameters else NO_OWNER
            found = self._parameter_state(
                value, owner, f"{name}.{naming.component(key)}", place, depth
            )
            return ((token,), self.leaves.to_node(found))
        number = numbering.numbers.get(id(key))
        if number is None:
            refuse(trail, "holds the state of a parameter that is in none of its groups")
        below = f"{name}.{numbering.state_name(number)}"
        return (
            number,
            self.leaves.to_node(
                self._parameter_state(value, id(key), below, (trail, number), depth)
            ),
        )

    def _parameter_state(
        self, value: Any, owner: int, name: str, trail: Trail, depth: int
    ) -> Node | PlainValue:
        """Walk the optimizer state of one parameter."""
        outer, self.leaves.owner = self.leaves.owner, owner
        try:
            return self._walk(value, name, trail, depth + 1)
        finally:
            self.leaves.owner = outer

    def _stateful(self, value: Any, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(value)
        if self.types[name] == "ZeroRedundancyOptimizer":
            refuse(
                trail,
                "is a ZeroRedundancyOptimizer, each rank of which has the state of some parameters only, without a "
                "public record of which; shard by torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        state = call_user_code(partial(object_state, value), "state_dict()", trail)
        return ("s", self.leaves.to_node(self._walk(state, name, trail, depth + 1)))


def _all_str(keys: Iterable[object]) -> bool:
    return set(map(type, keys)) <= {str}
