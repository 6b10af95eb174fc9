"""Leaves of a state: tensors become rows of the walk's table, other values tagged JSON.

What an image cannot store is refused with a CaptureError that names its path. Containers are the walk's concern.
"""

from __future__ import annotations

import io
import json
import threading
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from tierfall.core.state.view import DECLARED, NO_OWNER, Node
from tierfall.core.state.walk_cache import CachedPart, Columns, WalkCache, take_fingerprints
from tierfall.core.tensors import (
    builtin_codecs,
    names,
    numpy_values,
    tensors,
    value_codec,
    wrappers,
)
from tierfall.core.tensors.dtensor import (
    LocalBlocks,
    NotOneBlockError,
    TensorPiece,
    is_sharded,
    local_part,
)
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.errors import CaptureError
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


class TensorTable:
    """The table of a walk's tensors, in the order of the walk: each is stored once, under a unique name. Aliases (same
    memory, dtype, shape and strides) share a row; views that overlap partially have a row each. Plain lists: this is
    the inner loop of every save.

    While a walk repeats the rows of the previous one, it writes no columns and keeps those.
    """

    def __init__(self, cache: WalkCache) -> None:
        self.tensors: list[torch.Tensor] = []
        self.pointers = array("Q")
        self._cache = cache
        self._previous = cache.columns
        """The columns of the previous walk, until this one differs."""
        self._columns = Columns([], [], [], [], [], [], [], [], [])
        self._parts: dict[int, CachedPart] = {}
        self._used_names: set[str] = set()
        self._first_at: dict[int, int] = {}
        self._more_at: dict[int, list[int]] = {}
        self._has_aliases = False

    def add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        changes: Changes,
        trail: Trail,
        piece: TensorPiece | None = None,
        *,
        owner: int = NO_OWNER,
        alone: bool = False,
    ) -> int:
        """Add a tensor and return its number; an alias gets that of the earlier tensor, unless ``alone``. ``piece`` is
        its position in a sharded tensor, ``owner`` as in ``StateView.owners``."""
        pointer = tensor.data_ptr()
        number = len(self.tensors)
        address = pointer if tensor.numel() and not alone else 0
        plain = tensors.is_plain(tensor, dtype)
        strides = None if plain else tensors.dense_strides(tensor)
        row = (name, dtype, shape, changes, owner, trail, plain, strides, piece)
        if self._is_repeat(number, row, address):
            if address:
                self._first_at[address] = number
        else:
            self._diverge()
            alias = self._alias(address, number, tensor, row) if address else None
            if alias is not None:
                self._has_aliases = True
                self._apply_stricter(alias, changes, owner)
                return alias
            if name in self._used_names:
                # Only keys that hooks add to a state_dict can collide. No encoded key has a bare %: the name is free.
                row = (f"{name}%d{number}", *row[1:])
            self._used_names.add(row[0])
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)
        self.tensors.append(tensor)
        self.pointers.append(pointer)
        return number

    def _apply_stricter(self, number: int, changes: Changes, owner: int) -> None:
        """Memory that occurs twice follows the stricter rule. A parameter stays its owner, unless the user declared
        that it changes at any time."""
        rows = self._columns
        rules = (rows.changes[number], rows.owners[number]), (changes, owner)
        if Changes.ANYTIME not in (changes, rows.changes[number]):
            return
        rows.changes[number] = Changes.ANYTIME
        if (Changes.ANYTIME, DECLARED) in rules:
            rows.owners[number] = DECLARED
        else:
            parameter = max(owner, rows.owners[number])
            rows.owners[number] = parameter if parameter > DECLARED else NO_OWNER

    def cache_part(
        self,
        first: int,
        cache_key: tuple[Any, ...],
        owners: list[int],
        entries: Sequence[torch.Tensor],
        node: Any,
    ) -> CachedPart | None:
        """Describe the rows from number ``first`` on, which were added from ``entries``, for reuse by the next walk.

        None if the stored tensors are not among ``entries``, or one is an alias of an earlier row.
        """
        self._diverge()
        fingerprints = take_fingerprints(entries)
        if fingerprints is None or any(dtype.is_complex for dtype in self._columns.dtypes[first:]):
            return None  # fingerprints do not include lazy conjugation
        places = {id(tensor): place for place, tensor in enumerate(entries)}
        picked = [places.get(id(tensor)) for tensor in self.tensors[first:]]
        first_at = {at: self._first_at[at] for at in fingerprints.pointers if at in self._first_at}
        if None in picked or min(first_at.values(), default=first) < first:
            return None
        if not self._more_at.keys().isdisjoint(first_at):  # several tensors start at one address
            return None
        part = self._parts[first] = CachedPart(
            first=first,
            cache_key=cache_key,
            owners=owners,
            fingerprints=fingerprints._replace(
                shapes=_interned(fingerprints.shapes), strides=_interned(fingerprints.strides)
            ),
            node=node,
            columns=Columns(*(tuple(column[first:]) for column in self._columns)),
            pointers=self.pointers[first:],
            picked=None if picked == [*range(len(entries))] else tuple(picked),  # type: ignore[arg-type]
            first_at=first_at,
        )
        return part

    def reuse(self, part: CachedPart, entries: Sequence[torch.Tensor]) -> bool:
        """Add the rows of a cached part, with tensors out of ``entries``; False if the table already has one of the
        addresses or names."""
        first = len(self.tensors)
        # Rows that the previous walk already compared with this part need no comparison.
        repeats = self._previous is not None and self._cache.parts_at.get(first) is part
        if not repeats:
            self._diverge()
        if not self._first_at.keys().isdisjoint(part.first_at.keys()):
            return False
        if not repeats:
            if not self._used_names.isdisjoint(part.columns.names):
                return False
            self._append_columns(part)
        self._parts[first] = part
        self.pointers += part.pointers
        self.tensors += (
            entries if part.picked is None else [entries[place] for place in part.picked]
        )
        return True

    def finish(self) -> Columns:
        """The columns of all rows; stored in the cache for the next walk."""
        if self._previous is None or len(self._previous.names) != len(self.tensors):
            self._diverge()
            columns = Columns(*map(tuple, self._columns))
        else:
            columns = self._previous
        self._cache.columns = None if self._has_aliases else columns
        self._cache.parts_at = self._parts
        return columns

    # ---- repeating the previous walk

    def _is_repeat(self, number: int, row: tuple[Any, ...], address: int) -> bool:
        """Whether a row equals that of the previous walk, and is no alias. An ``address`` of 0 means none."""
        before = self._previous
        return (
            before is not None
            and number < len(before.names)
            and row == tuple(column[number] for column in before)
            and address not in self._first_at
            and not any(address in part.first_at for part in self._parts.values())
        )

    def _diverge(self) -> None:
        """Copy the rows so far from the previous walk's columns: from here on this walk differs."""
        before, self._previous = self._previous, None
        if before is None:
            return
        for column, rows in zip(self._columns, before, strict=True):
            column.extend(rows[: len(self.tensors)])
        self._used_names.update(self._columns.names)
        for part in self._parts.values():
            self._first_at.update(part.first_at)

    def _append_columns(self, part: CachedPart) -> None:
        for column, rows in zip(self._columns, part.columns, strict=True):
            column.extend(rows)
        self._used_names.update(part.columns.names)
        self._first_at.update(part.first_at)

    def _alias(
        self, address: int, number: int, tensor: torch.Tensor, row: tuple[Any, ...]
    ) -> int | None:
        """The number of an earlier alias of this tensor; None, after recording the address, if there is none."""
        _, dtype, shape, _, _, _, _, _, piece = row
        first = self._first_at.setdefault(address, number)
        if first == number:
            return None
        columns = self._columns
        other: int
        for other in (first, *self._more_at.get(address, ())):
            if (
                columns.dtypes[other] is dtype
                and columns.shapes[other] == shape
                and tensors.same_memory(self.tensors[other], tensor)
            ):
                if columns.block_positions[other] == piece:
                    return other
                break
        self._more_at.setdefault(address, []).append(number)
        return None


def _interned(values: Sequence[T]) -> list[T]:
    """The same values with equal ones as one object, since comparing identical objects is fast."""
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]


def _advice(value: object) -> str:
    """Return what to do about a value that cannot be saved."""
    if isinstance(value, _LEFT_OUT):
        return "leave it out of the state: the program makes it anew (register_codec, if it must be saved)"
    kind = type(value)
    return _ADVICE_BY_KIND.get(f"{kind.__module__}.{kind.__qualname__}", _ADVICE)


def refusal(trail: Trail, reason: str) -> CaptureError:
    return CaptureError(f"save: {names.path(trail)} {reason}")


def refuse(trail: Trail, reason: str) -> NoReturn:
    raise refusal(trail, reason)


def call_user_code(call: Callable[[], T], what: str, trail: Trail) -> T:
    """Call a method of the user's; a CaptureError names the path if it raises."""
    try:
        return call()
    except builtin_codecs.NotEncodableError as error:
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
        return all(type(child) is PlainValue for child in found)

    @classmethod
    def join(cls, coded: Coded, found: list[PlainValue]) -> PlainValue:
        """Return the plain value of a container, which has the blobs of its children."""
        return cls(coded, [blob for child in found for blob in child.blobs])


class Leaves:
    """Adds tensors to ``table``, and plain values to ``values``.

    The walk sets the context: ``declared``, the ``changes`` of the innermost ``item()``, and ``owner``, inside an
    optimizer the id of the parameter whose state it walks (NO_OWNER elsewhere).
    """

    def __init__(self, cache: WalkCache) -> None:
        self.table = TensorTable(cache)
        self.values: list[Coded] = []
        self.declared: Changes | None = None
        self.owner = NO_OWNER

    # ---- values

    def to_node(self, found: Node | PlainValue) -> Node:
        """Turn a plain value into a node, because its container holds tensors and is not a plain value itself."""
        if type(found) is not PlainValue:
            return found
        for number, (members, _) in enumerate(found.blobs):
            members["t"] = number
        self.values.append(found.coded)
        return ("v", len(self.values) - 1, *[source for _, source in found.blobs])

    def atom(self, value: object, trail: Trail) -> Coded:
        try:
            return value_codec.encode_atom(value)
        except builtin_codecs.NotEncodableError as error:
            refuse(trail, f"cannot be saved: {error}; {_advice(value)}")

    def builtin_codec(self, value: object, trail: Trail) -> builtin_codecs.ValueCodec | None:
        try:
            return builtin_codecs.codec_of(value)
        except builtin_codecs.NotEncodableError as error:
            refuse(trail, f"cannot be saved: {error}; {_advice(value)}")

    def key(self, key: object, trail: Trail) -> str | tuple[str]:
        if type(key) is str:
            return key
        return (json.dumps(self.atom(key, trail), separators=(",", ":")),)

    def text(self, value: str | bytes, name: str, trail: Trail) -> PlainValue:
        if len(value) <= value_codec.BLOB_BYTES // 4:  # at most 4 bytes of UTF-8 per character
            return PlainValue(value_codec.encode_atom(value))
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if len(data) <= value_codec.BLOB_BYTES:
            return PlainValue(value_codec.encode_atom(value))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._blob(flat, "str" if isinstance(value, str) else "bytes", name, trail)

    def array(self, value: Any, name: str, trail: Trail) -> PlainValue:
        reason = numpy_values.refusal(value)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}; save it as plain numbers or text")
        source = numpy_values.to_tensor(value)
        members = {"d": value.dtype.str, "s": list(value.shape)}
        return self._blob(source, "array", name, trail, **members)

    def generator(self, value: torch.Generator, name: str, trail: Trail) -> PlainValue:
        return self._blob(value.get_state(), "generator", name, trail, d=str(value.device))

    def _blob(
        self, flat: torch.Tensor, kind: str, name: str, trail: Trail, **members: Coded
    ) -> PlainValue:
        coded = {value_codec.TAG: "blob", "k": kind, "t": 0, **members}
        return PlainValue(
            coded, [(coded, self.add(flat, flat.dtype, tuple(flat.shape), name, trail))]
        )

    # ---- tensors

    def local_parts(
        self, entries: list[Any], cache_key: tuple[Any, ...], trail: Trail
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Replace DTensors by this rank's parts, and append the parts' positions to the cache key."""
        parts = [self._local_part(t, trail) if is_sharded(t) else (t, None) for t in entries]
        return [local for local, _ in parts], (*cache_key, [piece for _, piece in parts])

    def _local_part(self, tensor: torch.Tensor, trail: Trail) -> tuple[torch.Tensor, TensorPiece]:
        try:
            return local_part(tensor)
        except NotOneBlockError as error:
            refuse(trail, f"cannot be saved: {error}")

    def tensor(
        self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int = NO_OWNER
    ) -> Node:
        """Add a tensor. ``owner`` is the id of the parameter whose memory it is."""
        if is_sharded(tensor):
            if isinstance(tensor, nn.Parameter):
                owner = id(tensor)
            local, piece = self._local_part(tensor, trail)
            reason = tensors.refusal(local)
            if reason is not None:
                refuse(trail, f"cannot be saved: {reason}")
            shape = tuple(local.shape)
            return self.add(local, local.dtype, shape, name, trail, owner=owner, piece=piece)
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
        return self.add(tensor, tensor.dtype, tensor.shape, name, trail, owner=owner)

    def blocks(self, blocks: LocalBlocks, name: str, trail: Trail) -> Node:
        """Add this rank's blocks of a tensor that the caller sharded."""
        parts = blocks.parts
        if len(parts) == 1 and parts[0][1] is None and not wrappers.is_wrapper(parts[0][0]):
            return self.tensor(parts[0][0], name, trail)
        numbers = [
            self._block(tensor, piece, f"{name}%p{number}" if number else name, trail)
            for number, (tensor, piece) in enumerate(parts)
        ]
        return numbers[0] if len(numbers) == 1 else ("p", tuple(numbers))

    def _block(
        self, tensor: torch.Tensor, piece: TensorPiece | None, name: str, trail: Trail
    ) -> int:
        """Add a block, never as an alias: another rank may hold this block for only one of two tied tensors."""
        reason = tensors.refusal(tensor)
        if reason is None and tensor.is_quantized:
            reason = "a quantized tensor in blocks"
        if reason is None and (piece is None or piece.lengths != tuple(tensor.shape)):
            reason = f"a block of shape {tuple(tensor.shape)} at the position {piece}"
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        changes, owner = self.change_rule(NO_OWNER)
        tensor = tensor.detach()
        kind = (tensor.dtype, tensor.shape)
        return self.table.add(tensor, *kind, name, changes, trail, piece, owner=owner, alone=True)

    def _quantized(self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int) -> Node:
        try:
            scheme = str(tensor.qscheme())
        except RuntimeError as error:
            raise refusal(trail, f"cannot be saved: {tensors.UNSCALED}") from error
        flat = tensors.as_bytes(tensor.detach().contiguous())
        assert flat is not None, "a contiguous tensor without bytes"
        number = self.add(flat, tensor.dtype, tensor.shape, name, trail, owner=owner)
        if tensor.qscheme() == torch.per_tensor_affine:
            self.values.append([value_codec.encode_atom(tensor.q_scale()), tensor.q_zero_point()])
            return ("q", number, scheme, 0, ("v", len(self.values) - 1))
        parts = (
            self.tensor(tensor.q_per_channel_scales().clone(), f"{name}%scales", trail),
            self.tensor(tensor.q_per_channel_zero_points().clone(), f"{name}%zero_points", trail),
        )
        return ("q", number, scheme, tensor.q_per_channel_axis(), ("l", parts))

    def _wrapper(self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int) -> Node:
        if isinstance(tensor, nn.Parameter):
            owner = id(tensor)
        if name.count("%") > value_codec.DEPTH_MAX:
            refuse(trail, f"is nested deeper than {value_codec.DEPTH_MAX} levels")
        parts = call_user_code(lambda: wrappers.take_apart(tensor), "__tensor_flatten__", trail)
        nodes = tuple(
            self.tensor(inner, f"{name}%{attribute}", trail, owner=owner)
            for attribute, inner in parts.tensors.items()
        )
        self.values.append(parts.coded)
        shape = ("v", len(self.values) - 1)
        return ("w", parts.class_name, tuple(parts.tensors), (*nodes, shape))

    def change_rule(self, owner: int) -> tuple[Changes, int]:
        """When a tensor may change, and whose step changes it; the user's ``item(changes=...)`` has precedence."""
        if self.declared is not None:
            return self.declared, DECLARED
        owner = self.owner if owner == NO_OWNER else owner
        return (Changes.ANYTIME if owner == NO_OWNER else Changes.ON_STEP), owner

    def add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        trail: Trail,
        *,
        owner: int = NO_OWNER,
        piece: TensorPiece | None = None,
    ) -> int:
        """Add a tensor that the caller has validated to the table; return its number."""
        changes, owner = self.change_rule(owner)
        return self.table.add(tensor, dtype, shape, name, changes, trail, piece, owner=owner)
