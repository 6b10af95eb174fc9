"""Parsing of an image's header from untrusted bytes.

Nothing that is read is executed, and no size is used for an allocation before it is checked against the image's. Any
defect is damage: an IntegrityError that describes the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tierfall.core.format.documents import FORMAT, JsonFields, refuse_constant
from tierfall.core.format.records import HEADER_BYTES_MAX
from tierfall.core.image.layout import (
    DIVIDED,
    ELSEWHERE,
    LAYOUT_MEMBER,
    LENGTH_BYTES,
    VALUES_MEMBER,
    WRAPPERS,
    part_name,
    table_digest,
)
from tierfall.core.image.tree import (
    MapNode,
    Node,
    PiecesNode,
    QuantizedNode,
    SequenceNode,
    TensorNode,
    TreeReader,
    ValueNode,
    WrapperNode,
    walk,
)
from tierfall.core.tensors import dtypes, numpy_values, value_codec
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.tensors import are_dense
from tierfall.core.tensors.value_codec import Coded, Contents
from tierfall.core.types.errors import IntegrityError, NotSupportedError

# The limit of a header's content, plus what rounding up adds.
_LENGTH_MAX = HEADER_BYTES_MAX + (1 << 20)
_REQUIRED: tuple[list[str], ...] = tuple(
    others + wrappers
    for others in ([], [ELSEWHERE], [ELSEWHERE, DIVIDED])
    for wrappers in ([], [WRAPPERS])
)
_QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an image: its real dtype and shape, and its byte range relative to the start of the data. ``piece``:
    it is a block of a sharded tensor. ``strides``: it was dense in memory but not contiguous.

    ``written_by``: its bytes are in that rank's image. ``parts``: they are divided, ``(rank, end)`` of each consecutive
    byte range. In both cases its range here is a virtual one behind the end of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    piece: TensorPiece | None = None
    written_by: int | None = None
    strides: tuple[int, ...] | None = None
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks in whose images its bytes are; none if they are in this one."""
        if self.written_by is not None:
            return (self.written_by,)
        return tuple(rank for rank, _ in self.parts)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal in the image that has a tensor's bytes."""
        return self.dtype, self.piece, self.shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this is, or is a block of."""
        return self.shape if self.piece is None else self.piece.shape

    @property
    def is_quantized(self) -> bool:
        return dtypes.name_of(self.dtype) in _QUANTIZED


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """The content of an image. ``tensors`` are in image order; the tree's positions are indices into them.

    ``types`` are the classes of optimizers and other objects, by name. ``merged``: the header was merged from those of
    several ranks, and its tensors are whole.
    ``complete``: each tensor of the rank's state is in the tree as one block; otherwise, only the headers of all ranks
    together describe the state.
    """

    what: str
    data_start: int
    data_bytes: int
    tensors: tuple[StoredTensor, ...]
    tree: MapNode = field(repr=False)
    values: tuple[Coded, ...] = field(repr=False)
    types: Mapping[str, str] = field(default_factory=dict, repr=False)
    merged: bool = False
    complete: bool = True

    @property
    def written_by_others(self) -> tuple[StoredTensor, ...]:
        """The tensors that other ranks write, or a part of them, in order."""
        return tuple(stored for stored in self.tensors if stored.writers)

    @property
    def writers(self) -> frozenset[int]:
        """The ranks that write the tensors of ``written_by_others``."""
        return frozenset(rank for stored in self.tensors for rank in stored.writers)

    @property
    def is_whole(self) -> bool:
        """Whether no tensor of it is only a block of one."""
        return self.complete and all(t.shape == t.whole_shape for t in self.tensors)

    @property
    def own_parts(self) -> frozenset[int]:
        """The positions of this image's parts of divided tensors, to which the tree does not refer."""
        divided = [stored for stored in self.tensors if stored.parts]
        names = {part_name(stored.name, n) for stored in divided for n in range(len(stored.parts))}
        return frozenset(at for at, t in enumerate(self.tensors) if names and t.name in names)


def read_header(
    data: bytes | bytearray | memoryview, *, image_bytes: int, what: str
) -> ImageHeader:
    """Parse the header of an image of ``image_bytes`` bytes from its first bytes; ``what`` names it in errors.

    IntegrityError if it has any defect, NotSupportedError if a newer tierfall wrote it.
    """
    fault = f"{what}: the header is damaged, or was not written by tierfall"
    try:
        return _read(data, image_bytes, what, fault)
    except NotSupportedError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise IntegrityError(f"{fault}: {error}") from error


def _read(
    data: bytes | bytearray | memoryview, image_bytes: int, what: str, fault: str
) -> ImageHeader:
    data_start = _data_start(data, image_bytes)
    table = _object(_parse(bytes(data[LENGTH_BYTES:data_start])), "header")
    metadata = JsonFields(_object(table.pop("__metadata__", None), "__metadata__"), fault)
    static = _object(_parse(metadata.get(LAYOUT_MEMBER, str)), LAYOUT_MEMBER)
    members = JsonFields(static, fault)
    if static.get("format") != FORMAT or static.get("requires") not in _REQUIRED:
        raise NotSupportedError(
            f"{what}: written in format {static.get('format')!r} requiring {static.get('requires')!r}; this tierfall "
            f"reads format {FORMAT}: install the tierfall that wrote it, or a newer one"
        )
    tensors = read_table(table, members.get("dtypes", list), image_bytes - data_start)
    rows = ((name, x["dtype"], x["shape"], *x["data_offsets"]) for name, x in table.items())
    if static.get("table") != table_digest(rows):
        raise ValueError(
            "its tensors are not those that tierfall wrote: another program has changed the file. Write it without its "
            "metadata, and import it: the tensors come by name"
        )
    if ELSEWHERE in static["requires"]:
        elsewhere = members.get(ELSEWHERE, list)
        tensors += _written_by_others(elsewhere, tensors, image_bytes - data_start)
    if members.has("sharded"):
        tensors = _with_pieces(tensors, members.get("sharded", list))
    tensors = _with_strides(tensors, members.get("strides", list))
    types = members.get("types", dict)
    if not all(isinstance(name, str) for name in types.values()):
        raise ValueError("a class name in types is not a string")
    values = _parse(metadata.get(VALUES_MEMBER, str))
    if not isinstance(values, list):
        raise ValueError(f"{VALUES_MEMBER} is not a list")
    reader = TreeReader(len(tensors), len(values))
    tree = reader.read(static.get("tree"))
    if not isinstance(tree, MapNode):
        raise ValueError("the tree is not a mapping")
    header = ImageHeader(
        what=what,
        data_start=data_start,
        data_bytes=image_bytes - data_start,
        tensors=tensors,
        tree=tree,
        values=tuple(values),
        types=types,
        complete=not reader.in_pieces,
    )
    used = reader.used_positions | header.own_parts
    if len(used) != len(tensors) or len(reader.used_values) != len(values):
        raise ValueError("the tree leaves out tensors or values")
    check = _ValueCheck(tensors, values)
    check.tree(tree)
    check.groups(reader.groups)
    return header


def _data_start(data: bytes | bytearray | memoryview, image_bytes: int) -> int:
    if len(data) < LENGTH_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for a header")
    (length,) = struct.unpack("<Q", data[:LENGTH_BYTES])
    if length > _LENGTH_MAX:
        raise ValueError(f"its length is {length} bytes, more than the limit of {_LENGTH_MAX}")
    data_start: int = LENGTH_BYTES + length
    if data_start > len(data) or data_start > image_bytes:
        raise ValueError(
            f"it ends at byte {data_start} of an image of {image_bytes} bytes, of which {len(data)} were read"
        )
    return data_start


# ---- the table of tensors


def read_table(
    table: dict[str, Any], true_dtypes: list[Any], data_bytes: int
) -> tuple[StoredTensor, ...]:
    """Parse a table in the order of its tensors' bytes, which are all ``data_bytes``; ValueError for any defect."""
    stored, end = [], 0
    for name, entry in table.items():
        tensor = _tensor(name, _object(entry, name))
        if tensor.start != end:
            raise ValueError(
                f"tensor {name!r} begins at {tensor.start}, expected {end}: hole or overlap"
            )
        end = tensor.end
        stored.append(tensor)
    if end != data_bytes:
        raise ValueError(f"the tensors take {end} bytes, the file has {data_bytes} for them")
    for entry in true_dtypes:
        position, tensor = _true_tensor(entry, stored)
        stored[position] = tensor
    return tuple(stored)


def _tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    code, shape = entry.get("dtype"), entry.get("shape")
    dtype = dtypes.from_code(code)
    if dtype is None or shape is None or not dtypes.is_shape(shape):
        raise ValueError(
            f"tensor {name!r:.80} has no valid shape, or an unknown dtype: {code!r:.40}"
        )
    match entry.get("data_offsets"):
        case [int(start), int(end)] if len(entry) == 3:
            pass
        case _:
            raise ValueError(f"tensor {name!r} has no offsets")
    if end - start != dtypes.byte_count(dtype, shape):
        raise ValueError(
            f"tensor {name!r} has {end - start} bytes, which does not match its dtype and shape"
        )
    return StoredTensor(name, dtype, tuple(shape), start, end)


def _true_tensor(entry: Any, stored: list[StoredTensor]) -> tuple[int, StoredTensor]:
    position, name, shape = _row(entry, "dtypes", 3)
    raw, dtype = _tensor_at(position, "dtypes", stored), dtypes.from_name(name)
    if dtype is None:
        raise ValueError(
            f"tensor {raw.name!r} is of dtype {name!r:.60}, unknown to torch {torch.__version__}"
        )
    if raw.dtype is not torch.uint8 or len(raw.shape) != 1 or not dtypes.is_shape(shape):
        raise ValueError(f"tensor {raw.name!r} is not stored as bytes, or its shape is invalid")
    if dtypes.byte_count(dtype, shape) != raw.length:
        raise ValueError(
            f"tensor {raw.name!r} has {raw.length} bytes, which does not match its true dtype and shape"
        )
    return position, StoredTensor(raw.name, dtype, tuple(shape), raw.start, raw.end)


def _written_by_others(
    entries: list[Any], tensors: tuple[StoredTensor, ...], end: int
) -> tuple[StoredTensor, ...]:
    """Parse the list of what other ranks write. Its sizes are unverified: check them against those ranks' images before
    allocating."""
    found, names = [], {stored.name for stored in tensors}
    for entry in entries:
        name, dtype_name, shape, by = _row(entry, "elsewhere", 4)
        dtype = dtypes.from_name(dtype_name) if isinstance(dtype_name, str) else None
        if not isinstance(name, str) or name in names:
            raise ValueError("elsewhere lists a tensor without a name, or twice")
        if dtype is None or not dtypes.is_shape(shape):
            raise ValueError(f"tensor {name!r} of another rank has no valid dtype or shape")
        start, end = end, end + dtypes.byte_count(dtype, shape)
        names.add(name)
        stored = StoredTensor(name, dtype, tuple(shape), start, end)
        if isinstance(by, list):
            found.append(replace(stored, parts=_parts(stored, by)))
        elif type(by) is int and by >= 0:
            found.append(replace(stored, written_by=by))
        else:
            raise ValueError(f"tensor {name!r} of another rank has no valid rank")
    return tuple(found)


def _parts(stored: StoredTensor, entries: list[Any]) -> tuple[tuple[int, int], ...]:
    """Parse the parts of a divided tensor: together they are all of it, each of whole elements."""
    parts = tuple(tuple(_row(entry, "elsewhere", 2)) for entry in entries)
    if any(type(rank) is not int or type(end) is not int or rank < 0 for rank, end in parts):
        raise ValueError(f"tensor {stored.name!r} has a part without a rank or an end")
    ends = [end for _, end in parts]
    if ends != sorted({*ends}) or not ends or ends[0] <= 0 or ends[-1] != stored.length:
        raise ValueError(f"tensor {stored.name!r} is not the sum of its parts")
    if stored.is_quantized or any(end % stored.dtype.itemsize for end in ends):
        raise ValueError(f"tensor {stored.name!r} is divided within an element")
    return parts


def _with_pieces(tensors: tuple[StoredTensor, ...], entries: list[Any]) -> tuple[StoredTensor, ...]:
    found = list(tensors)
    for entry in entries:
        position, shape, offset = _row(entry, "sharded", 3)
        stored = _tensor_at(position, "sharded", found)
        if not dtypes.is_shape(shape) or not dtypes.is_shape(offset):
            raise ValueError(f"tensor {stored.name!r} is a block with an invalid shape or offset")
        if not len(shape) == len(offset) == len(stored.shape) or any(
            at + length > whole
            for at, length, whole in zip(offset, stored.shape, shape, strict=True)
        ):
            raise ValueError(f"tensor {stored.name!r} is a block outside of the whole tensor")
        found[position] = replace(
            stored, piece=TensorPiece(tuple(shape), tuple(offset), stored.shape)
        )
    return tuple(found)


def _with_strides(
    tensors: tuple[StoredTensor, ...], entries: list[Any]
) -> tuple[StoredTensor, ...]:
    found = list(tensors)
    for entry in entries:
        position, strides = _row(entry, "strides", 2)
        stored = _tensor_at(position, "strides", found)
        if not dtypes.is_shape(strides) or not are_dense(stored.shape, strides):
            raise ValueError(f"tensor {stored.name!r} has strides with gaps or overlaps")
        found[position] = replace(stored, strides=tuple(strides))
    return tuple(found)


def _row(entry: Any, list_name: str, members: int) -> list[Any]:
    if not isinstance(entry, list) or len(entry) != members:
        raise ValueError(f"an entry of {list_name} does not have {members} members")
    return entry


def _tensor_at(position: Any, list_name: str, tensors: list[StoredTensor]) -> StoredTensor:
    if type(position) is not int or not 0 <= position < len(tensors):
        raise ValueError(f"{list_name} names a tensor that is not in the table")
    return tensors[position]


# ---- values, and tensors in the context of the tree


class _ValueCheck:
    """Decodes every value with placeholders for blobs, so that later decoding cannot fail."""

    def __init__(self, tensors: tuple[StoredTensor, ...], values: list[Coded]) -> None:
        self._tensors = tensors
        self._values = values

    def tree(self, node: Node) -> None:
        for each in walk(node):
            match each:
                case ValueNode():
                    self._decode(each)
                case QuantizedNode():
                    self._quantized(each)
                case WrapperNode():
                    self._wrapper(each)
                case PiecesNode():
                    self._pieces(each)
                case TensorNode() if self._tensors[each.position].is_quantized:
                    raise ValueError("a quantized tensor lacks its scale")

    def groups(self, nodes: list[ValueNode]) -> None:
        for node in nodes:
            if type(self._decode(node)) is not dict:
                raise ValueError("an optimizer's group is not a mapping")

    def _decode(self, node: ValueNode) -> Any:
        return value_codec.decode(self._values[node.number], Contents(partial(self._blob, node)))

    def _blob(self, node: ValueNode, number: int, kind: str, members: dict[str, Any]) -> object:
        if not 0 <= number < len(node.blobs):
            raise ValueError("a value refers to a blob that it does not have")
        tensor = self._tensors[node.blobs[number]]
        dtype, shape = members.get("d"), members.get("s")
        match kind:
            case "array":
                if not isinstance(dtype, str) or not dtypes.is_shape(shape):
                    raise ValueError("an array lacks its dtype or its shape")
                numpy_values.check_bytes(dtype, shape or [], tensor.length)
            case "generator":
                if not isinstance(dtype, str) or tensor.dtype is not torch.uint8:
                    raise ValueError("a generator lacks its device or its state")
                value_codec.decode({value_codec.TAG: "device", "v": dtype}, Contents())
            case "str" | "bytes":
                if tensor.dtype is not torch.uint8:
                    raise ValueError("bytes are stored as a tensor of another dtype")
            case _:
                raise ValueError(f"a blob is of the unknown kind {kind[:40]!r}")
        return None

    def _wrapper(self, node: WrapperNode) -> None:
        shape = self._decode(node.shape)
        if not isinstance(shape, list) or len(shape) != 3 or not dtypes.is_shape(shape[1]):
            raise ValueError(f"a tensor of {node.class_name[:80]!r} lacks its size")
        strides = shape[2] if isinstance(shape[2], list) else []
        if len(strides) != len(shape[1]) or any(type(v) is not int or v < 0 for v in strides):
            raise ValueError(f"a tensor of {node.class_name[:80]!r} lacks its stride")

    def _pieces(self, node: PiecesNode) -> None:
        blocks = [self._tensors[position] for position in node.positions]
        if len({(b.dtype, b.piece and b.piece.shape) for b in blocks}) > 1 or any(
            block.piece is None or block.is_quantized for block in blocks
        ):
            raise ValueError(f"tensor {blocks[0].name!r} has blocks of different tensors")

    def _quantized(self, node: QuantizedNode) -> None:
        tensor = self._tensors[node.position]
        if not tensor.is_quantized:
            raise ValueError(f"tensor {tensor.name!r} has a scale, but is not quantized")
        if node.scheme == "torch.per_tensor_affine":
            if not isinstance(node.parameters, ValueNode):
                raise ValueError(f"tensor {tensor.name!r} lacks its scale")
            read = self._decode(node.parameters)
            if not isinstance(read, list) or [type(v) for v in read] != [float, int]:
                raise ValueError(f"tensor {tensor.name!r} lacks its scale or its zero point")
        else:
            self._per_channel(node, tensor)

    def _per_channel(self, node: QuantizedNode, tensor: StoredTensor) -> None:
        if not isinstance(node.parameters, SequenceNode) or len(node.parameters.nodes) != 2:
            raise ValueError(f"tensor {tensor.name!r} lacks its scales or its zero points")
        if not 0 <= node.axis < len(tensor.shape):
            raise ValueError(f"tensor {tensor.name!r} has no axis {node.axis}")
        for part in node.parameters.nodes:
            expected = (tensor.shape[node.axis],)
            if not isinstance(part, TensorNode) or self._tensors[part.position].shape != expected:
                raise ValueError(
                    f"tensor {tensor.name!r} has scales or zero points of another length"
                )


# ---- JSON


def _parse(data: bytes | str) -> Any:
    return json.loads(data, object_pairs_hook=_unique, parse_constant=refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has a member twice")
    return result


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name!r:.80} is missing, or not an object")
    return value
