"""One walk of a state: every tensor once, every value written down, and the tree that holds them.

The walk fixes values at its moment and refuses, naming the path, what cannot be saved. It decides nothing about where
bytes lie (``layout``) and copies no tensor. A node of the tree is a tuple that compares cheaply (two walks of one
structure give equal trees) and holds no value that may change: those stand aside, in ``values``.

    7                                   tensor number 7 of the view
    ("v", 3, 8, 9)                      value number 3, whose blobs are the tensors 8 and 9
    ("d", kind, keys, nodes)            a mapping that holds tensors; a key is str, or (coded,) for any other type
    ("l", nodes), ("t", nodes)          a list, a tuple
    ("m", keys, names, nodes)           a module's state_dict; names is () where they equal the keys
    ("o", names, groups, state)         a stock optimizer: per parameter its name or None, per group numbers and node
    ("s", node)                         an object with state_dict and load_state_dict
    ("q", number, scheme, axis, node)   a quantized tensor's integers, and a node for its scale and zero point
    ("c", name, node)                   a value of a registered type, written as something that holds tensors
    ("r", node)                         the random state of the process
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.errors import CaptureError
from tierfall.core.image import arrays, codec, modules, naming, optimizers, random_state, tensors
from tierfall.core.image.codec import Coded
from tierfall.core.image.item import Item
from tierfall.core.image.modules import Scans
from tierfall.core.image.naming import Trail
from tierfall.core.image.recall import Recall, look
from tierfall.core.image.refusing import asked, refusal, refuse
from tierfall.core.image.sharded import Piece, Unsharded, any_sharded, is_sharded, local_part
from tierfall.core.image.table import TensorTable
from tierfall.core.values import Changes
from tierfall.core.words import with_article

Node = Any  # int, or one of the tuples above
T = TypeVar("T")


class SourceTensor(NamedTuple):
    """One stored tensor: its name in the image, itself (detached), when it may change, and where it stands."""

    name: str
    tensor: torch.Tensor
    changes: Changes
    trail: Trail

    @property
    def path(self) -> str:
        """Where the tensor stands, as Python code would reach it: ``state["model"]["layer.weight"]``."""
        return naming.path(self.trail)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """A state at one moment: its tensors (aliases resolved), and its values written down.

    Of each tensor, in columns: itself, detached (``sources``), when it may change, its place, whether its elements can
    be copied as they lie (``plain``), and where it lies in a tensor of several ranks (``pieces``). ``parameters`` are
    those of all modules in the state, and bare ones: by id, the name and itself. ``structure`` holds all that a layout
    depends on: equal structures have equal layouts.
    """

    names: tuple[str, ...]
    sources: list[torch.Tensor]
    changes: tuple[Changes, ...]
    trails: list[Trail]
    plain: tuple[bool, ...]
    parameters: Mapping[int, tuple[str, nn.Parameter]]
    optimizers: tuple[Optimizer, ...]
    tree: Node
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece | None, ...]
    values: list[Coded]
    structure: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        return tuple(map(SourceTensor, self.names, self.sources, self.changes, self.trails))


def describe(state: Mapping[Any, object], recall: Recall | None = None) -> StateView:
    """Walk a state; CaptureError, naming the path, where something in it cannot be saved.

    ``recall`` is what earlier walks of this state left, and what this one leaves.
    """
    if not isinstance(state, Mapping):
        raise CaptureError(
            f"save: state is {with_article(type(state).__name__)}; expected a mapping of names to what is to be saved"
        )
    scans = modules.scan_state(state)
    walk = _Walk(scans, Recall() if recall is None else recall)
    tree = walk.state(state)
    walk.end()
    table = walk.table
    names, dtypes, shapes = tuple(table.names), tuple(table.dtypes), tuple(table.shapes)
    pieces = tuple(table.pieces)
    return StateView(
        names=names,
        sources=table.tensors,
        changes=tuple(table.changes),
        trails=table.trails,
        plain=tuple(table.plain),
        parameters=scans.parameters,
        optimizers=tuple(walk.optimizers),
        tree=tree,
        dtypes=dtypes,
        shapes=shapes,
        pieces=pieces,
        values=walk.values,
        structure=(tree, names, dtypes, shapes, pieces),
    )


class _Plain:
    """A value that holds no tensors, written down, and its blobs, still without numbers."""

    __slots__ = ("blobs", "coded")

    def __init__(self, coded: Coded, blobs: Sequence[tuple[dict[str, Any], int]] = ()) -> None:
        self.coded = coded
        self.blobs = blobs


_SCALARS = frozenset({int, float, bool, type(None)})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})


class _Walk:
    def __init__(self, scans: Scans, recall: Recall) -> None:
        self.scans = scans
        self._recall = recall
        self._recalled: set[str] = set()
        self.table = TensorTable()
        self.values: list[Coded] = []
        self.optimizers: list[Optimizer] = []
        self._ancestors: set[int] = set()
        self._ruled: Changes | None = None  # what the innermost item() says
        self._inside_optimizer = False

    def end(self) -> None:
        self._recall.forget_others(self._recalled)

    def state(self, state: Mapping[Any, object]) -> Node:
        keys, nodes = [], []
        for key, value in state.items():
            trail = (None, key)
            keys.append(self._key(key, trail))
            nodes.append(self._settle(self._walk(value, naming.part(key), trail, 0)))
        if random_state.ENTRY not in state:
            keys.append(random_state.ENTRY)
            found = self._walk(random_state.capture(), random_state.ENTRY, (None, "rng"), 0)
            nodes.append(("r", self._settle(found)))
        return ("d", "dict", tuple(keys), tuple(nodes))

    # ---- dispatch

    def _walk(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _Plain:
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value, name, trail)
        if kind in _SCALARS:
            return _Plain(codec.encode_atom(value))
        if kind is str or kind is bytes:
            return self._text(value, name, trail)
        if depth > codec.DEPTH_MAX:
            refuse(trail, f"is nested deeper than {codec.DEPTH_MAX} levels")
        if kind is tuple or kind is list or kind in codec.MAPPINGS:
            return self._container(value, name, trail, depth)
        registered = codec.codec_for(kind)
        if registered is not None:
            return self._registered(registered, value, name, trail, depth)
        return self._object(value, name, trail, depth)

    def _object(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _Plain:
        if isinstance(value, Item):
            return self._item(value, name, trail, depth)
        if isinstance(value, nn.Module):
            return self._within(value, trail, lambda: self._module(value, name, trail, depth))
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            if optimizers.is_stock(value):
                return self._within(
                    value, trail, lambda: self._optimizer(value, name, trail, depth)
                )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, trail)
        if isinstance(value, torch.Generator):
            return self._generator(value, name, trail)
        if arrays.is_array(value):
            return self._array(value, name, trail)
        if is_stateful(value):
            return self._within(value, trail, lambda: self._stateful(value, name, trail, depth))
        return _Plain(self._atom(value, trail))

    def _within(self, value: object, trail: Trail, visit: Callable[[], T]) -> T:
        if id(value) in self._ancestors:
            refuse(trail, "contains itself")
        self._ancestors.add(id(value))
        try:
            return visit()
        finally:
            self._ancestors.discard(id(value))

    def _settle(self, found: Node | _Plain) -> Node:
        """Give a value its number, where its container holds tensors and so is not a value itself."""
        if type(found) is not _Plain:
            return found
        for number, (members, _) in enumerate(found.blobs):
            members["t"] = number
        self.values.append(found.coded)
        return ("v", len(self.values) - 1, *[source for _, source in found.blobs])

    # ---- values

    def _atom(self, value: object, trail: Trail) -> Coded:
        try:
            return codec.encode_atom(value)
        except codec.Uncodable as error:
            refuse(trail, f"cannot be saved: {error}; {_ADVICE}")

    def _key(self, key: object, trail: Trail) -> str | tuple[str]:
        if type(key) is str:
            return key
        return (json.dumps(self._atom(key, trail), separators=(",", ":")),)

    def _text(self, value: str | bytes, name: str, trail: Trail) -> _Plain:
        if len(value) <= codec.BLOB_BYTES // 4:
            return _Plain(codec.encode_atom(value))
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if len(data) <= codec.BLOB_BYTES:
            return _Plain(codec.encode_atom(value))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._blob(flat, "str" if isinstance(value, str) else "bytes", name, trail)

    def _blob(
        self, flat: torch.Tensor, kind: str, name: str, trail: Trail, **members: Coded
    ) -> _Plain:
        coded = {codec.TAG: "blob", "k": kind, "t": 0, **members}
        return _Plain(coded, [(coded, self._add(flat, flat.dtype, tuple(flat.shape), name, trail))])

    def _array(self, value: Any, name: str, trail: Trail) -> _Plain:
        reason = arrays.why_not(value)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}; save it as plain numbers or text")
        source = arrays.to_tensor(value)
        members = {"d": value.dtype.str, "s": list(value.shape)}
        return self._blob(source, "array", name, trail, **members)

    def _generator(self, value: torch.Generator, name: str, trail: Trail) -> _Plain:
        return self._blob(value.get_state(), "generator", name, trail, d=str(value.device))

    def _registered(
        self, registered: codec.Codec, value: object, name: str, trail: Trail, depth: int
    ) -> Node | _Plain:
        def encoded() -> Node | _Plain:
            inner = asked(lambda: registered.encode(value), f"codec {registered.name!r}", trail)
            return self._walk(inner, name, trail, depth + 1)

        found = self._within(value, trail, encoded)
        if type(found) is not _Plain:
            return ("c", registered.name, found)
        return _Plain({codec.TAG: "codec", "n": registered.name, "v": found.coded}, found.blobs)

    # ---- containers

    def _container(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _Plain:
        if type(value) is list:
            run = codec.encode_run(value)
            if run is not None:
                return _Plain(run)
        return self._within(value, trail, lambda: self._children(value, name, trail, depth))

    def _children(self, value: Any, name: str, trail: Trail, depth: int) -> Node | _Plain:
        if type(value) is list or type(value) is tuple:
            found = [
                self._walk(child, f"{name}.{i}", (trail, i), depth + 1)
                for i, child in enumerate(value)
            ]
            if _all_plain(found):
                coded = [child.coded for child in found]
                return _join(coded if type(value) is list else codec.tagged("tuple", coded), found)
            return ("l" if type(value) is list else "t", tuple(map(self._settle, found)))
        kind = codec.MAPPINGS[type(value)]
        keys = [self._key(key, (trail, key)) for key in value]
        found = [
            self._walk(child, f"{name}.{naming.part(key)}", (trail, key), depth + 1)
            for key, child in value.items()
        ]
        if _all_plain(found):
            return _join(codec.encode_items(kind, list(value), [c.coded for c in found]), found)
        return ("d", kind, tuple(keys), tuple(map(self._settle, found)))

    def _item(self, value: Item, name: str, trail: Trail, depth: int) -> Node | _Plain:
        outer = self._ruled
        self._ruled = value.changes or outer
        try:
            return self._within(
                value, trail, lambda: self._walk(value.value, name, trail, depth + 1)
            )
        finally:
            self._ruled = outer

    # ---- what has a state_dict

    def _module(self, module: nn.Module, name: str, trail: Trail, depth: int) -> Node:
        scan = self.scans.of(module, name)
        state = asked(module.state_dict, "state_dict()", trail)
        if not isinstance(state, Mapping) or not _all_str(state):
            refuse(
                trail, f"has a state_dict() that is not a mapping of str: {type(state).__name__}"
            )
        keys = tuple(state)
        about = ("module", keys, scan.signature(), self._ruled, self._inside_optimizer)
        met = list(state.values())
        if any_sharded(met):
            met, about = self._local_parts(met, about, trail)
        return self._recalled_or(
            name, about, met, lambda: self._module_anew(scan, state, keys, name, trail, depth)
        )

    def _recalled_or(
        self, name: str, about: tuple[Any, ...], met: list[Any], walk: Callable[[], Node]
    ) -> Node:
        """Return the node that stood for these tensors at the last walk, or walk them and remember it."""
        first = len(self.table.names)
        part = self._recall.part(name)
        self._recalled.add(name)
        looks = look(met) if part is not None else None
        same = part is not None and looks is not None and part.is_again(first, about, looks)
        if part is not None and same and self.table.take(part, met):
            return part.node
        values = len(self.values)
        node = walk()
        again = len(self.values) == values and self.table.part(first, about, met, node)
        self._recall.keep(name, again or None)
        return node

    def _module_anew(
        self,
        scan: modules.ModuleScan,
        state: Mapping[str, Any],
        keys: tuple[str, ...],
        name: str,
        trail: Trail,
        depth: int,
    ) -> Node:
        names = tuple(map(scan.key_name, keys))
        nodes = []
        for key, below, value in zip(keys, names, state.values(), strict=True):
            if type(value) is torch.Tensor or is_sharded(value):
                on_step = scan.parameter_of(key, value) is not None
                node = self._tensor(value, f"{name}.{below}", (trail, key), on_step=on_step)
            else:
                found = self._walk(value, f"{name}.{below}", (trail, key), depth + 1)
                node = self._settle(found)
            nodes.append(node)
        return ("m", keys, () if names == keys else names, tuple(nodes))

    def _optimizer(self, optimizer: Optimizer, name: str, trail: Trail, depth: int) -> Node:
        numbering = optimizers.numbering(optimizer, self.scans)
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            place = ((trail, "param_groups"), index)
            values = optimizers.group_values(group)
            found = self._walk(values, f"{name}.param_groups.{index}", place, depth + 1)
            groups.append((numbering.groups[index], self._settle(found)))
        outer, self._inside_optimizer = self._inside_optimizer, True
        try:
            state = self._states(optimizer, numbering, f"{name}.state", (trail, "state"), depth)
        finally:
            self._inside_optimizer = outer
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
        about = ("optimizer", numbering.names, numbers, [*map(len, held)], keys, self._ruled)
        met = [*chain.from_iterable(map(dict.values, held))]
        if any_sharded(met):
            met, about = self._local_parts(met, about, trail)
        return self._recalled_or(name, about, met, anew)

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
            found = self._walk(value, f"{name}.{naming.part(key)}", place, depth + 1)
            return ((token,), self._settle(found))
        number = numbering.numbers.get(id(key))
        if number is None:
            refuse(trail, "holds the state of a parameter that is in none of its groups")
        found = self._walk(value, f"{name}.{numbering.part(number)}", (trail, number), depth + 1)
        return (number, self._settle(found))

    def _stateful(self, value: Any, name: str, trail: Trail, depth: int) -> Node:
        state = asked(value.state_dict, "state_dict()", trail)
        return ("s", self._settle(self._walk(state, name, trail, depth + 1)))

    # ---- tensors

    def _local_part(self, tensor: torch.Tensor, trail: Trail) -> tuple[torch.Tensor, Piece]:
        try:
            return local_part(tensor)
        except Unsharded as error:
            refuse(trail, f"cannot be saved: {error}")

    def _local_parts(
        self, met: list[Any], about: tuple[Any, ...], trail: Trail
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Replace tensors of several ranks by this rank's parts, for a look at them; where those lie is another thing
        that has to be as it was."""
        parts = [self._local_part(t, trail) if is_sharded(t) else (t, None) for t in met]
        return [local for local, _ in parts], (*about, [piece for _, piece in parts])

    def _tensor(
        self, tensor: torch.Tensor, name: str, trail: Trail, *, on_step: bool = False
    ) -> Node:
        if is_sharded(tensor):
            on_step = on_step or isinstance(tensor, nn.Parameter)
            local, piece = self._local_part(tensor, trail)
            reason = tensors.refusal(local)
            if reason is not None:
                refuse(trail, f"cannot be saved: {reason}")
            shape = tuple(local.shape)
            return self._add(local, local.dtype, shape, name, trail, on_step=on_step, piece=piece)
        reason = tensors.refusal(tensor)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        on_step = on_step or type(tensor) is nn.Parameter
        if tensor.is_quantized:
            return self._quantized(tensor, name, trail, on_step=on_step)
        if tensor.requires_grad:
            tensor = tensor.detach()
        return self._add(tensor, tensor.dtype, tensor.shape, name, trail, on_step=on_step)

    def _quantized(self, tensor: torch.Tensor, name: str, trail: Trail, *, on_step: bool) -> Node:
        try:
            scheme = str(tensor.qscheme())
        except RuntimeError as error:
            raise refusal(trail, f"cannot be saved: {tensors.UNSCALED}") from error
        flat = tensors.as_bytes(tensor.detach().contiguous())
        assert flat is not None, "a contiguous tensor without bytes"
        number = self._add(flat, tensor.dtype, tensor.shape, name, trail, on_step=on_step)
        if tensor.qscheme() == torch.per_tensor_affine:
            settled = self._settle(
                _Plain([codec.encode_atom(tensor.q_scale()), tensor.q_zero_point()])
            )
            return ("q", number, scheme, 0, settled)
        parts = (
            self._tensor(tensor.q_per_channel_scales().clone(), f"{name}%scales", trail),
            self._tensor(tensor.q_per_channel_zero_points().clone(), f"{name}%zero_points", trail),
        )
        return ("q", number, scheme, tensor.q_per_channel_axis(), ("l", parts))

    def _add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        trail: Trail,
        *,
        on_step: bool = False,
        piece: Piece | None = None,
    ) -> int:
        changes = Changes.ON_STEP if on_step or self._inside_optimizer else Changes.ANYTIME
        return self.table.add(tensor, dtype, shape, name, self._ruled or changes, trail, piece)


_ADVICE = "save what it is made of, give it state_dict and load_state_dict, or teach tierfall with register_codec"


def is_stateful(value: object) -> bool:
    """Say whether an object tells its state through state_dict and load_state_dict."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _all_str(keys: Iterable[object]) -> bool:
    return set(map(type, keys)) <= {str}


def _all_plain(found: list[Any]) -> bool:
    return all(type(child) is _Plain for child in found)


def _join(coded: Coded, found: list[_Plain]) -> _Plain:
    return _Plain(coded, [blob for child in found for blob in child.blobs])
