"""The walk of a state: collects every tensor once, encodes every value, and builds the tree of containers.

Values are fixed at the time of the walk. What cannot be saved is refused with its path. The walk assigns no offsets
(``core.image.layout`` does) and copies no tensor. Its result is a ``StateView`` (``view``).
"""

from __future__ import annotations

import io
import json
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.state import modules, optimizers
from tierfall.core.state.item import Item, OnResize
from tierfall.core.state.modules import KnownModuleTree, ModuleTree, Scans
from tierfall.core.state.state_dicts import is_stateful, object_state, type_name
from tierfall.core.state.view import DECLARED, NO_OWNER, UNSHARED, Node, StateView
from tierfall.core.state.walk_cache import TensorTable, WalkCache
from tierfall.core.tensors import builtin_codecs, numpy_values, rng, tensors, value_codec, wrappers
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.builtin_codecs import NotEncodableError, ValueCodec
from tierfall.core.tensors.dtensor import (
    Branch,
    LocalBlocks,
    NotOneBlockError,
    TensorPiece,
    any_sharded,
    is_sharded,
    local_part,
)
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.errors import CaptureError, RestoreError
from tierfall.core.types.text import with_article
from tierfall.core.types.values import Changes

T = TypeVar("T")
_ADVICE = (
    "save vars(it) or its parts, give it state_dict and load_state_dict, make it a dataclass, or register a codec with "
    "register_codec"
)
_LEFT_OUT = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    io.IOBase,
    type(threading.Lock()),
    threading.Thread,
)
_ADVICE_BY_KIND = {
    "builtins.generator": "save how many items were taken, and skip so many after restore: docs/exact-resume.md",
    "random.Random": "save getstate(), and call setstate() after restore",
    "numpy.random._generator.Generator": "save its bit_generator.state, and set that after restore",
    "numpy.random.mtrand.RandomState": "save get_state(legacy=False), and call set_state() after restore",
    "torch.utils.data.dataloader.DataLoader": "save where it is in the data: docs/exact-resume.md",
}


def check_state(state: object, doing: str = "save") -> None:
    """Raise CaptureError, or RestoreError in a restore, unless a state is a mapping."""
    if not isinstance(state, Mapping):
        raise (RestoreError if doing == "restore" else CaptureError)(
            f"{doing}: state is {with_article(type(state).__name__)}; expected a mapping of names to objects, such as "
            '{"model": model}'
        )


def walk_state(
    state: Mapping[Any, object], cache: WalkCache | None = None, *, with_random: bool = True
) -> StateView:
    """Walk a state; CaptureError with the path of an entry that cannot be saved.

    ``cache`` has the results of the previous walk of this state, and is updated. ``with_random`` adds the process's
    random state, unless the state has an entry of that name.
    """
    check_state(state)
    cache = WalkCache() if cache is None else cache
    scans = modules.scan_state(state, cache.trees)
    walk = _Walk(scans, cache)
    tree = walk.state(state, with_random=with_random)
    walk.finish()
    table = walk.table
    rows = table.finish()
    kinds = (rows.names, rows.dtypes, rows.shapes, rows.block_positions, rows.plain, rows.strides)
    return StateView(
        **rows._asdict(),
        sources=table.tensors,
        pointers=table.pointers,
        parameters=scans.parameters,
        live_parameters=scans.live,
        optimizers=tuple(walk.optimizers),
        tree=tree,
        values=walk.values,
        rules=walk.rules,
        types=walk.types,
        structure=(tree, *kinds, walk.types),
    )


_SCALARS = frozenset({int, float, bool, type(None)})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_FILLED_IN_PLACE = frozenset({list, tuple, Branch, Item, *value_codec.MAPPINGS})


def _advice(value: object) -> str:
    """Return what to do about a value that cannot be saved."""
    if isinstance(value, _LEFT_OUT):
        return "leave it out of the state: the program makes it anew (register_codec, if it must be saved)"
    kind = type(value)
    return _ADVICE_BY_KIND.get(f"{kind.__module__}.{kind.__qualname__}", _ADVICE)


def refusal(trail: Trail, reason: str) -> CaptureError:
    return CaptureError(f"save: {naming.path(trail)} {reason}")


def refuse(trail: Trail, reason: str) -> NoReturn:
    raise refusal(trail, reason)


def call_user_code(call: Callable[[], T], what: str, trail: Trail) -> T:
    """Call a method of the user's; a CaptureError names the path if it raises."""
    try:
        return call()
    except NotEncodableError as error:
        refuse(trail, f"cannot be saved: {error}; {_ADVICE}")
    except Exception as error:
        reason = f"cannot be saved: its {what} raised {type(error).__name__}: {error}"
        raise refusal(trail, reason) from error


class PlainValue:
    """An encoded value without tensors, and its blobs: each blob's JSON members, and its tensor's number in the
    table."""

    __slots__ = ("blobs", "coded")

    def __init__(self, coded: Coded, blobs: Sequence[tuple[dict[str, Any], int]] = ()) -> None:
        self.coded = coded
        self.blobs = blobs

    @staticmethod
    def are(found: list[Any]) -> bool:
        return set(map(type, found)) <= {PlainValue}

    @classmethod
    def join(cls, coded: Coded, found: list[PlainValue]) -> PlainValue:
        """Return the plain value of a container, which has the blobs of its children."""
        return cls(coded, [blob for child in found for blob in child.blobs])


class _Walk:
    """The walk of one state. ``_declared`` is the ``changes`` of the innermost ``item()``; ``_owner`` is the id of the
    parameter whose optimizer state is walked (NO_OWNER elsewhere)."""

    def __init__(self, scans: Scans, cache: WalkCache) -> None:
        self.scans = scans
        self._cache = cache
        self._used_names: set[str] = set()
        self._numberings: dict[str, optimizers.Numbering] = {}
        self.table = TensorTable(cache)
        self.values: list[Coded] = []
        self._declared: Changes | None = None
        self._owner = NO_OWNER
        self.rules: dict[str, OnResize] = {}
        self.types: dict[str, str] = {}
        self.optimizers: list[Optimizer] = []
        self._ancestors: dict[int, object] = {}
        self._blocks_with: dict[int, tuple[int, ...]] = {}
        """The blocks of the same tensor, by the number of each."""

    def finish(self) -> None:
        self._cache.forget_others(self._used_names)
        self._cache.numberings = self._numberings

    def state(self, state: Mapping[Any, object], *, with_random: bool) -> Node:
        keys, nodes = [], []
        for key, value in state.items():
            trail = (None, key)
            keys.append(self._key(key, trail))
            nodes.append(self._to_node(self._walk(value, naming.component(key), trail, 0)))
        if with_random and rng.ENTRY not in state:
            keys.append(rng.ENTRY)
            found = self._walk(rng.capture(), rng.ENTRY, (None, "rng"), 0)
            nodes.append(("r", self._to_node(found)))
        return ("d", "dict", tuple(keys), tuple(nodes))

    # ---- dispatch

    def _walk(self, value: Any, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value, name, trail)
        if kind in _SCALARS:
            return PlainValue(value_codec.encode_atom(value))
        if kind is str or kind is bytes:
            return self._text(value, name, trail)
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
            return self._blocks(value, name, trail)
        if isinstance(value, nn.Module):
            return self._guard_cycle(value, trail, lambda: self._module(value, name, trail, depth))
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            if optimizers.is_stock(value):
                return self._guard_cycle(
                    value, trail, lambda: self._optimizer(value, name, trail, depth)
                )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, trail)
        if isinstance(value, torch.Generator):
            return self._generator(value, name, trail)
        if numpy_values.is_array(value):
            return self._array(value, name, trail)
        if is_stateful(value):
            return self._guard_cycle(
                value, trail, lambda: self._stateful(value, name, trail, depth)
            )
        return self._value(value, name, trail, depth)

    def _value(self, value: object, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        try:
            builtin = builtin_codecs.codec_of(value)
            if builtin is None:
                return PlainValue(value_codec.encode_atom(value))
        except NotEncodableError as error:
            refuse(trail, f"cannot be saved: {error}; {_advice(value)}")
        return self._registered(builtin, value, name, trail, depth)

    def _guard_cycle(self, value: object, trail: Trail, visit: Callable[[], T]) -> T:
        if id(value) in self._ancestors:
            refuse(trail, "contains itself")
        self._ancestors[id(value)] = value
        try:
            return visit()
        finally:
            del self._ancestors[id(value)]

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
            return ("l" if type(value) is list else "t", tuple(map(self._to_node, found)))
        kind = value_codec.MAPPINGS.get(type(value), "dict")  # a Branch
        keys = [*value] if _all_str(value) else [self._key(key, (trail, key)) for key in value]
        found = [
            PlainValue(value_codec.encode_atom(child))
            if type(child) in _SCALARS
            else self._walk(child, f"{name}.{naming.component(key)}", (trail, key), depth + 1)
            for key, child in value.items()
        ]
        if type(value) is not Branch and PlainValue.are(found):
            return PlainValue.join(
                value_codec.encode_items(kind, list(value), [c.coded for c in found]), found
            )
        return ("d", kind, tuple(keys), tuple(map(self._to_node, found)))

    def _item(self, value: Item, name: str, trail: Trail, depth: int) -> Node | PlainValue:
        outer = self._declared
        self._declared = value.changes or outer
        if value.on_resize is not OnResize.RESHARD:
            self.rules[name] = value.on_resize
        try:
            return self._guard_cycle(
                value, trail, lambda: self._walk(value.value, name, trail, depth + 1)
            )
        finally:
            self._declared = outer

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
        owners = scan.owners_of(state)
        made = [key for key, owner in zip(keys, owners, strict=True) if owner == NO_OWNER]
        if unshared := tensors.unshared(state, made):
            owners = [
                UNSHARED if key in unshared else o for key, o in zip(keys, owners, strict=True)
            ]
        entries = list(state.values())
        cache_key: Any = ("module", keys, scan.signature(), self._declared, self._owner, owners)
        if any_sharded(entries):
            entries, cache_key = self._local_parts(entries, cache_key, trail)
        node = self._cached_or(
            name,
            cache_key,
            entries,
            lambda: self._walk_module(scan, state, owners, name, trail, depth),
        )
        if tree is not None:
            self._cache.trees[name] = modules.describe_tree(scan, tree, keys, self._declared)
        else:
            self._cache.trees.pop(name, None)
        return node

    def _cached_tree(self, tree: ModuleTree, known: KnownModuleTree, name: str) -> Node | None:
        """The node of the previous walk, if the tree has the same shape and the tensors the same fingerprints; spares
        the call of state_dict."""
        part = self._cache.find(name)
        if part is None or known.declared is not self._declared:
            return None
        sources: Any = map(tree.tensors.__getitem__, known.entries_at)
        return self._cached(name, part.cache_key, [*map(torch.Tensor.detach, sources)])

    def _cached(
        self, name: str, cache_key: tuple[Any, ...], entries: list[torch.Tensor]
    ) -> Node | None:
        """The node of the previous walk, if these tensors have the same fingerprints."""
        self._used_names.add(name)
        part, first = self._cache.find(name), len(self.table.tensors)
        if part is None or part.first != first or part.cache_key != cache_key:
            return None
        if not (part.fingerprints.are_of(entries) and self.table.reuse(part, entries)):
            return None
        return part.node

    def _cached_or(
        self,
        name: str,
        cache_key: tuple[Any, ...],
        entries: list[Any],
        walk: Callable[[], Node],
    ) -> Node:
        """As ``_cached``; if there is no such node, walk and cache them."""
        node = self._cached(name, cache_key, entries)
        if node is not None:
            return node
        first, values = len(self.table.tensors), len(self.values)
        node = walk()
        known = None
        if len(self.values) == values:
            known = self.table.cache_part(first, cache_key, entries, node)
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
            if type(value) is torch.Tensor or is_sharded(value) or wrappers.is_wrapper(value):
                node = self._tensor(value, f"{name}.{below}", (trail, key), owner=owner)
            else:
                found = self._walk(value, f"{name}.{below}", (trail, key), depth + 1)
                node = self._to_node(found)
            nodes.append(node)
        return ("m", keys, () if names == keys else names, tuple(nodes))

    def _optimizer(self, optimizer: Optimizer, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(optimizer)
        before = self._cache.numberings.get(name)
        numbering = optimizers.number_parameters(optimizer, self.scans, before)
        self._numberings[name] = numbering
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            place = ((trail, "param_groups"), index)
            values = {key: value for key, value in group.items() if key != "params"}
            found = self._walk(values, f"{name}.param_groups.{index}", place, depth + 1)
            groups.append((numbering.groups[index], self._to_node(found)))
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
        ids, keys = [*map(id, state)], [*chain.from_iterable(states)]
        numbered = (numbering.names, numbering.numbers)
        cache_key: Any = ("optimizer", *numbered, ids, [*map(len, states)], keys, self._declared)
        entries = [*chain.from_iterable(map(dict.values, states))]
        if any_sharded(entries):
            entries, cache_key = self._local_parts(entries, cache_key, trail)
        node = self._cached(name, cache_key, entries)
        if node is not None:
            return node
        if not _all_str(keys) or not numbering.numbers.keys() >= set(ids):
            return walk()
        return self._cached_or(name, cache_key, entries, walk)

    def _optimizer_state(
        self,
        key: Any,
        value: Any,
        numbering: optimizers.Numbering,
        name: str,
        trail: Trail,
        depth: int,
    ) -> tuple[Any, Node]:
        """The key of an entry of an optimizer's state in its node, and the node of the entry."""
        if isinstance(key, torch.Tensor):
            number = numbering.numbers.get(id(key))
            if number is None:
                refuse(trail, "holds the state of a parameter that is in none of its groups")
            entry: Any = number
            owner, below = id(key), numbering.state_name(number)
            place: Trail = (trail, number)
        else:
            owner = numbering.ids[0] if numbering.ids else NO_OWNER
            place = (trail, key)
            entry = (self._key(key, place),)
            below = naming.component(key)
        outer, self._owner = self._owner, owner
        try:
            found = self._walk(value, f"{name}.{below}", place, depth + 1)
        finally:
            self._owner = outer
        return entry, self._to_node(found)

    def _stateful(self, value: Any, name: str, trail: Trail, depth: int) -> Node:
        self.types[name] = type_name(value)
        if self.types[name] == "ZeroRedundancyOptimizer":
            refuse(
                trail,
                "is a ZeroRedundancyOptimizer, each rank of which has the state of some parameters only, without a "
                "public record of which; shard by torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        state = call_user_code(partial(object_state, value), "state_dict()", trail)
        return ("s", self._to_node(self._walk(state, name, trail, depth + 1)))

    # ---- values

    def _to_node(self, found: Node | PlainValue) -> Node:
        """Turn a plain value into a node, because its container holds tensors and is not a plain value itself."""
        if type(found) is not PlainValue:
            return found
        for number, (members, _) in enumerate(found.blobs):
            members["t"] = number
        self.values.append(found.coded)
        return ("v", len(self.values) - 1, *[source for _, source in found.blobs])

    def _key(self, key: object, trail: Trail) -> str | tuple[str]:
        if type(key) is str:
            return key
        try:
            coded = value_codec.encode_atom(key)
        except NotEncodableError as error:
            refuse(trail, f"cannot be saved: {error}; {_advice(key)}")
        return (json.dumps(coded, separators=(",", ":")),)

    def _text(self, value: str | bytes, name: str, trail: Trail) -> PlainValue:
        if len(value) <= value_codec.BLOB_BYTES // 4:  # at most 4 bytes of UTF-8 per character
            return PlainValue(value_codec.encode_atom(value))
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if len(data) <= value_codec.BLOB_BYTES:
            return PlainValue(value_codec.encode_atom(value))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._blob(flat, "str" if isinstance(value, str) else "bytes", name, trail)

    def _array(self, value: Any, name: str, trail: Trail) -> PlainValue:
        reason = numpy_values.refusal(value)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}; save it as plain numbers or text")
        source = numpy_values.to_tensor(value)
        members = {"d": value.dtype.str, "s": list(value.shape)}
        return self._blob(source, "array", name, trail, **members)

    def _generator(self, value: torch.Generator, name: str, trail: Trail) -> PlainValue:
        return self._blob(value.get_state(), "generator", name, trail, d=str(value.device))

    def _blob(
        self, flat: torch.Tensor, kind: str, name: str, trail: Trail, **members: Coded
    ) -> PlainValue:
        coded = {value_codec.TAG: "blob", "k": kind, "t": 0, **members}
        return PlainValue(
            coded, [(coded, self._add(flat, flat.dtype, tuple(flat.shape), name, trail))]
        )

    # ---- tensors

    def _local_parts(
        self, entries: list[Any], cache_key: tuple[Any, ...], trail: Trail
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Replace DTensors by this rank's parts, and append the parts' positions to the cache key."""
        parts = [self._local_part(each, trail) for each in entries]
        return [local for local, _ in parts], (*cache_key, [piece for _, piece in parts])

    def _local_part(
        self, tensor: torch.Tensor, trail: Trail
    ) -> tuple[torch.Tensor, TensorPiece | None]:
        try:
            return local_part(tensor)
        except NotOneBlockError as error:
            refuse(trail, f"cannot be saved: {error}")

    def _tensor(
        self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int = NO_OWNER
    ) -> Node:
        """Add a tensor. ``owner`` is the id of the parameter whose memory it is."""
        if is_sharded(tensor):
            if isinstance(tensor, nn.Parameter):
                owner = id(tensor)
            return self._block(*self._local_part(tensor, trail), name, trail, owner=owner)
        if wrappers.is_wrapper(tensor):
            return self._wrapper(tensor, name, trail, owner=owner)
        reason = tensors.refusal(tensor)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        if type(tensor) is nn.Parameter:
            owner = id(tensor)
        if tensor.is_quantized:
            return self._quantized(tensor, name, trail, owner=owner)
        if tensor.requires_grad:
            tensor = tensor.detach()
        return self._add(tensor, tensor.dtype, tensor.shape, name, trail, owner=owner)

    def _blocks(self, blocks: LocalBlocks, name: str, trail: Trail) -> Node:
        """Add this rank's blocks of a tensor that the caller sharded."""
        parts = blocks.parts
        if len(parts) == 1 and parts[0][1] is None and not wrappers.is_wrapper(parts[0][0]):
            return self._tensor(parts[0][0], name, trail)
        if not {*map(type, self._ancestors.values())} <= _FILLED_IN_PLACE:
            refuse(
                trail,
                "cannot be saved: a block within another object could not be restored in place: put it into a dict, "
                "list or tuple of the state",
            )
        named = [(*part, f"{name}%p{at}" if at else name) for at, part in enumerate(parts)]
        together = tuple(
            self._block(tensor.detach(), piece, below, trail, alone=blocks.alone)
            for tensor, piece, below in named
        )
        if any(self._blocks_with.setdefault(n, together) != together for n in together):
            refuse(
                trail,
                "cannot be saved: it has some of another tensor's blocks, not all: clone them",
            )
        return together[0] if len(together) == 1 else ("p", together)

    def _block(
        self,
        tensor: torch.Tensor,
        piece: TensorPiece | None,
        name: str,
        trail: Trail,
        *,
        owner: int = NO_OWNER,
        alone: bool = False,
    ) -> int:
        """Add this rank's part of a tensor, or one of them."""
        reason = tensors.refusal(tensor)
        if reason is None and tensor.is_quantized:
            reason = "a quantized tensor in blocks"
        if reason is None and (piece is None or piece.lengths != tuple(tensor.shape)):
            reason = f"a block of shape {tuple(tensor.shape)} at the position {piece}"
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        kind = (tensor.dtype, tuple(tensor.shape))
        return self._add(tensor, *kind, name, trail, owner=owner, piece=piece, alone=alone)

    def _quantized(self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int) -> Node:
        try:
            scheme = str(tensor.qscheme())
        except RuntimeError as error:
            raise refusal(trail, f"cannot be saved: {tensors.UNSCALED}") from error
        flat = tensors.as_bytes(tensor.detach().contiguous())
        assert flat is not None, "a contiguous tensor without bytes"
        number = self._add(flat, tensor.dtype, tensor.shape, name, trail, owner=owner)
        if tensor.qscheme() == torch.per_tensor_affine:
            self.values.append([value_codec.encode_atom(tensor.q_scale()), tensor.q_zero_point()])
            return ("q", number, scheme, 0, ("v", len(self.values) - 1))
        parts = (
            self._tensor(tensor.q_per_channel_scales().clone(), f"{name}%scales", trail),
            self._tensor(tensor.q_per_channel_zero_points().clone(), f"{name}%zero_points", trail),
        )
        return ("q", number, scheme, tensor.q_per_channel_axis(), ("l", parts))

    def _wrapper(self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int) -> Node:
        if isinstance(tensor, nn.Parameter):
            owner = id(tensor)
        if name.count("%") > value_codec.DEPTH_MAX:
            refuse(trail, f"is nested deeper than {value_codec.DEPTH_MAX} levels")
        parts = call_user_code(lambda: wrappers.take_apart(tensor), "__tensor_flatten__", trail)
        nodes = tuple(
            self._tensor(inner, f"{name}%{attribute}", trail, owner=owner)
            for attribute, inner in parts.tensors.items()
        )
        self.values.append(parts.coded)
        shape = ("v", len(self.values) - 1)
        return ("w", parts.class_name, tuple(parts.tensors), (*nodes, shape))

    def _add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        trail: Trail,
        *,
        owner: int = NO_OWNER,
        piece: TensorPiece | None = None,
        alone: bool = False,
    ) -> int:
        """Add a tensor that the caller has validated to the table; return its number. Its owner decides when it may
        change, and by whose step, unless the user's ``item(changes=...)`` does."""
        if self._declared is not None:
            changes, owner = self._declared, DECLARED
        else:
            owner = self._owner if owner == NO_OWNER else owner
            changes = Changes.ANYTIME if owner == NO_OWNER else Changes.ON_STEP
        return self.table.add(
            tensor, dtype, shape, name, changes, trail, piece, owner=owner, alone=alone
        )


def _all_str(keys: Iterable[object]) -> bool:
    return set(map(type, keys)) <= {str}
