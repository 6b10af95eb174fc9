"""The layout of an image: the offset of each tensor, planned once per structure of the state.

    0            8                     8 + JSON length              data_start, a multiple of 64 KiB
    | length     | safetensors JSON    | spaces                     | tensors, largest items first, then by name ...

The JSON consists of parts that are serialised once per layout, and the values, which change with every save. At least 4
KiB of spaces follow it at planning, so that growing values do not move the data. Tensors are ordered by item size, so
that each is aligned to its items without gaps. Tensors that another rank writes are in the tree but have no bytes here:
a list of their own (``elsewhere``) continues the numbering of tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.format.documents import FORMAT, Spliced, dumps, sha256
from tierfall.core.format.records import HEADER_BYTES_MAX, IMAGE_BYTES_MAX, ImagePlan
from tierfall.core.state.view import Node, StateView
from tierfall.core.tensors import dtypes
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.errors import CaptureError

DATA_ALIGNMENT_BYTES = 64 << 10
SLACK_BYTES = 4 << 10
LENGTH_BYTES = 8

LAYOUT_MEMBER = "tierfall"
VALUES_MEMBER = "tierfall.values"
ELSEWHERE = "elsewhere"
"""The member that lists what other ranks write; also its name in ``requires``, as a reader must support it."""
DIVIDED = "divided"
"""In ``requires`` of an image that lists tensors of which several ranks write a part each."""
WRAPPERS = "wrappers"
"""In ``requires`` of an image whose tree has wrappers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One tensor's byte range, relative to the start of the data, and its safetensors dtype and shape.

    ``index`` is its index in ``StateView.sources``. ``lengths`` is its true shape. ``part``: only this byte range of it
    is in the image, as a tensor of one dimension.
    """

    index: int
    name: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    part: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParts:
    """The consecutive byte ranges into which a tensor is divided: ``(rank, end)`` of each, and which of them this rank
    writes."""

    parts: tuple[tuple[int, int], ...]
    own: int | None = None


Elsewhere = Mapping[int, int | TensorParts]
"""The tensors that this rank does not write, or not whole, by number in the view: the rank that does, or the parts."""


def part_name(name: str, number: int) -> str:
    """Return the name, in the image that has it, of a part of a divided tensor."""
    return f"{name}%d{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The plan of an image. ``structure`` identifies the structure of the state and the part written elsewhere;
    ``pieces`` is the manifest's table of tensor blocks. ``written_by_others`` is as in ``plan_layout``."""

    structure: str
    placements: tuple[Placement, ...]
    data_start: int
    data_bytes: int
    written_by_others: Elsewhere = field(repr=False)
    pieces: Spliced = field(repr=False)
    _key: tuple[Any, ...] = field(repr=False)
    _before_values: bytes = field(repr=False)
    _after_values: bytes = field(repr=False)

    @property
    def image_bytes(self) -> int:
        return self.data_start + self.data_bytes

    def image_plan(self, chunk_bytes: int) -> ImagePlan:
        """What the manifest of an image has of this layout, for that division into chunks."""
        return ImagePlan(
            image_bytes=self.image_bytes,
            data_start=self.data_start,
            chunk_bytes=chunk_bytes,
            structure=self.structure,
            pieces=self.pieces,
        )

    def matches(self, view: StateView) -> bool:
        """Whether this is the layout of the view."""
        return self._key == view.structure

    def header(self, view: StateView) -> bytes | None:
        """The image's first ``data_start`` bytes for a matching view; None if its values need more room, so that the
        layout must be planned again."""
        values = _quote(dumps(view.values))
        length = self.data_start - LENGTH_BYTES
        used = len(self._before_values) + len(values) + len(self._after_values)
        if used > length:
            return None
        return b"".join(
            (
                struct.pack("<Q", length),
                self._before_values,
                values,
                self._after_values,
                b" " * (length - used),
            )
        )


def plan_layout(view: StateView, elsewhere: Elsewhere | None = None) -> Layout:
    """Plan the image of a view; CaptureError if its header or data would exceed the limits of an image."""
    elsewhere = elsewhere or {}
    placements = _place(view, elsewhere)
    position_of = [0] * len(view.names)
    for position, index in enumerate(
        [*(placement.index for placement in placements), *sorted(elsewhere)]
    ):
        position_of[index] = position
    required = {
        ELSEWHERE: bool(elsewhere),
        DIVIDED: any(isinstance(by, TensorParts) for by in elsewhere.values()),
        WRAPPERS: _has_wrapper(view.tree),
    }
    static = {
        "format": FORMAT,
        "requires": [name for name, is_required in required.items() if is_required],
        "tree": tree_to_json(view.tree, position_of),
        "dtypes": _true_dtypes(view, placements),
        "strides": _strides(view, position_of),
        "types": dict(view.types),
        "table": table_digest((p.name, p.dtype, p.shape, p.start, p.end) for p in placements),
    }
    if sharded := _sharded(view, position_of):
        static["sharded"] = sharded
    if elsewhere:
        static[ELSEWHERE] = _written_by_others(view, elsewhere)
    metadata = (("format", "pt"), (LAYOUT_MEMBER, dumps(static).decode("ascii")))
    members = b",".join(_quote(name) + b":" + _quote(text) for name, text in metadata)
    before = b'{"__metadata__":{' + members + b"," + _quote(VALUES_MEMBER) + b":"
    after = b"}" + b"".join(_table_entry(placement) for placement in placements) + b"}"
    used = LENGTH_BYTES + len(before) + len(_quote(dumps(view.values))) + len(after)
    data_start = -(-(used + SLACK_BYTES) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    data_bytes = placements[-1].end if placements else 0
    _check_sizes(used, data_start + data_bytes)
    return Layout(
        structure=sha256(before + after),
        placements=placements,
        data_start=data_start,
        data_bytes=data_bytes,
        written_by_others=elsewhere,
        pieces=_pieces(view, placements),
        _key=view.structure,
        _before_values=before,
        _after_values=after,
    )


def table_digest(rows: Iterable[tuple[str, str, Sequence[int], int, int]]) -> str:
    """Return the digest of the table of tensors: name, dtype, shape, start and end of each. The tree refers to tensors
    by position, so it is wrong for a table that another program wrote under this metadata."""
    return sha256(dumps([*rows]))


def _check_sizes(header_bytes: int, image_bytes: int) -> None:
    if header_bytes > HEADER_BYTES_MAX:
        raise CaptureError(
            f"save: the header of the image would take {header_bytes} bytes, more than the {HEADER_BYTES_MAX} that it "
            "may have; save large Python values as tensors, arrays or bytes"
        )
    if image_bytes > IMAGE_BYTES_MAX:
        raise CaptureError(
            f"save: the image would take {image_bytes} bytes, more than {IMAGE_BYTES_MAX}; does the state hold "
            "expanded tensors?"
        )


def _place(view: StateView, elsewhere: Elsewhere) -> tuple[Placement, ...]:
    names = [*view.names]
    sizes = [dtype.itemsize for dtype in view.dtypes]
    parts: dict[int, tuple[int, int]] = {}
    for index, by in elsewhere.items():
        if isinstance(by, TensorParts) and by.own is not None:
            names[index] = part_name(names[index], by.own)
            start = by.parts[by.own - 1][1] if by.own else 0
            parts[index] = start, by.parts[by.own][1]
    own = [index for index in range(len(names)) if index not in elsewhere or index in parts]
    order = sorted(own, key=lambda i: (-sizes[i], names[i]))
    placements, end = [], 0
    for index in order:
        dtype, shape = view.dtypes[index], tuple(view.shapes[index])
        if part := parts.get(index):
            shape = ((part[1] - part[0]) // dtype.itemsize,)
        start, end = end, end + dtypes.byte_count(dtype, shape)
        code = dtypes.code_of(dtype)
        placements.append(
            Placement(
                index=index,
                name=names[index],
                start=start,
                end=end,
                dtype=code or dtypes.RAW_CODE,
                shape=shape if code else (end - start,),
                lengths=shape,
                part=part,
            )
        )
    return tuple(placements)


def _true_dtypes(view: StateView, placements: Sequence[Placement]) -> list[Coded]:
    """Position, dtype and shape of tensors that are stored as U8 for lack of a safetensors dtype."""
    return [
        [position, dtypes.name_of(view.dtypes[placement.index]), list(placement.lengths)]
        for position, placement in enumerate(placements)
        if dtypes.code_of(view.dtypes[placement.index]) is None
    ]


def _strides(view: StateView, position_of: Sequence[int]) -> list[Coded]:
    """Position and strides of tensors that are dense in memory but not contiguous."""
    return [
        [position, list(strides)]
        for position, strides in sorted(zip(position_of, view.strides, strict=True))
        if strides is not None
    ]


def _sharded(view: StateView, position_of: Sequence[int]) -> list[Coded]:
    """Position, whole shape and offset of blocks of sharded tensors."""
    return [
        [position, list(piece.shape), list(piece.offset)]
        for position, piece in sorted(zip(position_of, view.block_positions, strict=True))
        if piece is not None
    ]


def _written_by_others(view: StateView, elsewhere: Elsewhere) -> list[Coded]:
    """Name, dtype, shape and rank of tensors that another rank writes; of divided ones rank and end of each part."""
    return [
        [
            view.names[i],
            dtypes.name_of(view.dtypes[i]),
            list(view.shapes[i]),
            [[*part] for part in by.parts] if isinstance(by, TensorParts) else by,
        ]
        for i, by in sorted(elsewhere.items())
    ]


def _table_entry(placement: Placement) -> bytes:
    entry = {
        "dtype": placement.dtype,
        "shape": placement.shape,
        "data_offsets": (placement.start, placement.end),
    }
    return b"," + _quote(placement.name) + b":" + dumps(entry)


def _pieces(view: StateView, placements: Sequence[Placement]) -> Spliced:
    """One entry per tensor: the whole tensor, this rank's block, or a part of its elements."""
    entries = []
    for placement in placements:
        lengths, index = placement.lengths, placement.index
        if placement.part is None:
            whole = TensorPiece(lengths, (0,) * len(lengths), lengths)
            piece = view.block_positions[index] or whole
        else:
            first = placement.part[0] // view.dtypes[index].itemsize
            piece = TensorPiece((math.prod(view.shapes[index]),), (first,), lengths)
        entries.append(
            {
                "name": placement.name,
                "dtype": dtypes.name_of(view.dtypes[placement.index]),
                "shape": piece.shape,
                "offset": piece.offset,
                "lengths": lengths,
                "start": placement.start,
                "end": placement.end,
            }
        )
    return Spliced(dumps(entries))


def tree_to_json(node: Node, position_of: Sequence[int]) -> Coded:
    """Encode a node of the walk with the positions of its tensors; ``tree.TreeReader`` decodes it."""
    if type(node) is int:
        return position_of[node]

    def write(child: Node) -> Coded:
        return tree_to_json(child, position_of)

    match node:
        case ("v", number, *blobs):
            return ["v", number, *[position_of[blob] for blob in blobs]]
        case ("d", kind, keys, nodes):
            return ["d", kind, [_key_to_json(key) for key in keys], [write(n) for n in nodes]]
        case ("l" | "t" | "p" as kind, nodes):
            return [kind, [write(n) for n in nodes]]
        case ("m" | "w" as kind, keys, names, nodes):
            return [kind, keys, names, [write(n) for n in nodes]]
        case ("o", names, groups, state):
            return [
                "o",
                names,
                [[numbers, write(n)] for numbers, n in groups],
                [[k if type(k) is int else _key_to_json(k[0]), write(n)] for k, n in state],
            ]
        case ("q", number, *members, child):
            return ["q", position_of[number], *members, write(child)]
        case (*members, child):
            return [*members, write(child)]
    raise AssertionError(f"unknown kind of node: {node!r}")


def _has_wrapper(node: Node) -> bool:
    match node:
        case ("w", *_):
            return True
        case ("d" | "m", _, _, nodes) | ("l" | "t", nodes):
            return any(map(_has_wrapper, nodes))
        case ("o", _, groups, state):
            return any(_has_wrapper(child) for _, child in (*groups, *state))
        case ("s" | "r", child) | ("c", _, child):
            return _has_wrapper(child)
    return False


def _key_to_json(key: str | tuple[str]) -> Coded:
    return key if type(key) is str else [json.loads(key[0])]


def _quote(text: str | bytes) -> bytes:
    return json.dumps(text if isinstance(text, str) else text.decode("ascii")).encode("ascii")
