"""Matching stored tensors to tensors of the state: same dtype and shape, filled in place.

A target whose elements are not contiguous is filled through a temporary. Targets that share all of their memory are
filled once. Memory that two stored tensors would fill is refused: the result would depend on their order. Two targets
of one stored tensor that overlap in part are refused: both cannot hold its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tierfall.core.image.tree import Node, QuantizedNode, TensorNode, WrapperNode
from tierfall.core.load.build import CPU, Builder
from tierfall.core.load.mismatch import MismatchReport
from tierfall.core.load.resize import can_resize, part_of, plan_common
from tierfall.core.tensors import builtin_codecs, dtypes, tensors, wrappers
from tierfall.core.tensors.dtensor import (
    NotOneBlockError,
    TensorPiece,
    is_sharded,
    local_part,
    local_tensor,
    piece_of,
)
from tierfall.core.tensors.written_memory import AddressRange, LiveMemory
from tierfall.core.types.errors import RestoreError


class TensorMatcher:
    """Adds targets to the builder, and collects what to do once they are filled: ``copies``, then ``checks``."""

    def __init__(
        self,
        builder: Builder,
        report: MismatchReport,
        resizes: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """``resizes`` returns whether the tensor of a name may have another shape than the stored one."""
        self._resizes = resizes
        self._resized: set[str] = set()
        self._builder = builder
        self._report = report
        self._claims: dict[int, list[tuple[torch.Tensor, int, str]]] = {}
        self._targets: dict[int, list[tuple[torch.Tensor, str]]] = {}
        self._kept: list[tuple[torch.Tensor, str]] = []
        self.copies: list[Callable[[], None]] = []
        self.checks: list[Callable[[], None]] = []

    def fill(self, node: Node, live: torch.Tensor, name: str) -> None:
        """Fill ``live`` from a stored tensor of any kind, in place."""
        match node:
            case QuantizedNode():
                self.quantized(node, live, name)
            case WrapperNode():
                self._wrapper(node, live, name)
            case TensorNode():
                self.tensor(node.position, live, name)

    def compare(self, position: int, live: torch.Tensor, name: str) -> bool:
        """Return whether dtype and shape are equal; report the mismatch where they are not."""
        stored = self._builder.header.tensors[position]
        try:
            piece = piece_of(live)
        except NotOneBlockError as error:
            self._report.refuses(name, f"cannot be restored into: {error}")
            return False
        shape = stored.shape if stored.piece is None else stored.piece.shape
        same = piece == stored.piece or self._builder.header.merged
        if live.dtype is stored.dtype and tuple(live.shape) == shape and same:
            return True
        self._report.differs(
            name,
            _describe(stored.dtype, shape, stored.piece),
            _describe(live.dtype, tuple(live.shape), piece),
        )
        return False

    def tensor(self, position: int, live: torch.Tensor, name: str) -> None:
        """Fill ``live`` from a stored tensor, in place; of a sharded tensor, this rank's block."""
        if self._resizes(name) and self._resize(position, live, name):
            return
        if is_sharded(live):
            if self.compare(position, live, name):
                local, piece = local_part(live)
                self._local(position, local, name, piece if self._builder.header.merged else None)
            return
        if wrappers.is_wrapper(live):
            self._report.differs(name, "a plain tensor", f"one of {_class_of(live)}")
            return
        reason = tensors.refusal(live)
        if reason is not None:
            self._report.refuses(name, f"cannot be restored into: {reason}")
        elif self.compare(position, live, name) and self._claim(position, live, name):
            self._target(position, live.detach(), name)

    def _resize(self, position: int, live: torch.Tensor, name: str) -> bool:
        """Fill what a tensor of another shape has in common with the stored one; False where the shapes are equal, or
        more differs than they."""
        stored = self._builder.header.tensors[position]
        if wrappers.is_wrapper(live) or tensors.refusal(local_tensor(live)) is not None:
            return False
        if live.shape == stored.whole_shape or live.dtype is not stored.dtype:
            return False
        if not can_resize(stored, live):
            return False
        local, offset = part_of(live)
        if self._claim(position, local, name):
            self._resized.add(name)
            self.copies.append(plan_common(self._builder, position, local.detach(), offset))
        return True

    def _local(
        self, position: int, live: torch.Tensor, name: str, block: TensorPiece | None
    ) -> None:
        reason = tensors.refusal(live)
        if reason is not None:
            self._report.refuses(name, f"cannot be restored into: {reason}")
        elif self._claim(position, live, name):
            self._target(position, live.detach(), name, block)

    def quantized(self, node: QuantizedNode, live: torch.Tensor, name: str) -> None:
        """Fill a quantized tensor, and set its stored scale and zero point."""
        if not self.compare(node.position, live, name):
            return
        try:
            scheme = str(live.qscheme())
        except RuntimeError:
            self._report.refuses(name, f"cannot be restored into: {tensors.UNSCALED}")
            return
        if scheme != node.scheme:
            self._report.differs(name, node.scheme, scheme)
            return
        self._builder.prepare(node, live.device)

        def copy() -> None:
            built = self._builder.build(node, live.device)
            # copy_ does not support all schemes. The tensor object stays and gets new memory.
            live.data = built

        self.copies.append(copy)

    def _wrapper(self, node: WrapperNode, live: torch.Tensor, name: str) -> None:
        """Fill the inner tensors of a wrapper, once class, context, size and stride were compared."""
        stored_class = node.class_name.replace(":", ".")
        if not wrappers.is_wrapper(live) or _class_of(live) != stored_class:
            self._report.differs(name, f"a tensor of {stored_class}", f"one of {_class_of(live)}")
            return
        try:
            parts = wrappers.take_apart(live)
        except builtin_codecs.NotEncodableError as error:
            self._report.refuses(name, f"cannot be restored into: {error}")
            return
        stored = self._builder.header.values[node.shape.number]
        if stored[1:] != parts.coded[1:]:
            self._report.differs(
                name,
                f"{stored_class} of size {tuple(stored[1])} and stride {tuple(stored[2])}",
                f"size {tuple(live.shape)} and stride {tuple(live.stride())}",
            )
        elif not parts.has_context(stored):
            self._report.differs(
                name,
                f"{stored_class} with the context {stored[0]!s:.200}",
                f"{parts.coded[0]!s:.200}",
            )
        elif tuple(parts.tensors) != node.attributes:
            self._report.differs(
                name, f"the inner tensors {node.attributes}", f"{tuple(parts.tensors)}"
            )
        else:
            inner = zip(node.tensors, parts.tensors.items(), strict=True)
            for child, (attribute, each) in inner:
                self.fill(child, each, f"{name}%{attribute}")

    def in_place(self) -> Iterator[LiveMemory]:
        """Yield the tensors that are read into directly, before all bytes are verified."""
        for targets in self._targets.values():
            for live, name in targets:
                if name not in self._resized and tensors.as_bytes(live) is not None:
                    yield LiveMemory(name, AddressRange.of(live))

    def skip(self, live: object, name: str) -> None:
        """Record a tensor that the caller skips."""
        if isinstance(live, torch.Tensor):
            kept = map(local_tensor, wrappers.inner_tensors(live))
            self._kept += [(each, name) for each in kept]

    def check_overlaps(self) -> None:
        """Find targets of different stored tensors that overlap in part, and check their bytes once all are filled.
        Both can be right only where the stored tensors agree in the overlap."""
        stored = self._builder.header.tensors
        spans = [
            (str(live.device), *tensors.span(live), position, live, name)
            for claims in self._claims.values()
            for live, position, name in claims
            if name not in self._resized
            and tensors.as_bytes(live) is not None
            and live.nbytes == stored[position].length
        ]
        spans.sort(key=lambda span: span[:3])
        overlapping: dict[str, tuple[int, torch.Tensor, str]] = {}
        last = None  # the span before on this device with the highest end
        for span in spans:
            device, start, end, position, live, name = span
            if last is None or device != last[0] or start >= last[2]:
                last = span
                continue
            overlapping.setdefault(last[5], (last[3], last[4], name))
            overlapping.setdefault(name, (position, live, last[5]))
            last = span if end > last[2] else last
        for name, (position, live, other) in overlapping.items():
            self._compare_filled(position, live, name, other)

    def _compare_filled(self, position: int, live: torch.Tensor, name: str, other: str) -> None:
        stored = self._builder.flat(position, CPU)

        def compare() -> None:
            flat = tensors.as_bytes(live.detach())
            if flat is None or not torch.equal(flat.cpu(), stored):
                raise RestoreError(
                    f"restore: {name} overlaps in part with {other} in the state, and their values in the checkpoint "
                    "differ; clone one of them, or restore one with only=[...]"
                )

        self.checks.append(compare)

    def check_kept(self) -> None:
        """Report skipped tensors whose memory is filled under another name."""
        for kept, name in self._kept:
            if kept.layout is not torch.strided or not kept.numel():
                continue
            for _, _, other in self._claims.get(kept.data_ptr(), ()):
                self._report.refuses(
                    name,
                    f"shares its memory with {other}, which is restored; skip cannot leave it unchanged: skip both, or "
                    "neither",
                )

    def _claim(self, position: int, live: torch.Tensor, name: str) -> bool:
        """Return whether ``live`` is to be filled: not if its memory is a target already."""
        if not live.numel():
            return False
        claims = self._claims.setdefault(live.data_ptr(), [])
        for other, other_position, other_name in claims:
            if not tensors.same_memory(other, live):
                continue
            if other_position != position and self._report.strict:
                self._report.refuses(
                    name,
                    f"shares its memory with {other_name} in the state, and has bytes of its own in the checkpoint; "
                    f"untie them, or pass strict=False to restore {other_name}",
                )
            return False
        claims.append((live, position, name))
        return self._is_apart(position, live, name)

    def _is_apart(self, position: int, live: torch.Tensor, name: str) -> bool:
        """Return whether ``live`` overlaps with no other target of the stored tensor; report it where it does."""
        targets = self._targets.setdefault(position, [])
        for other, other_name in targets:
            if tensors.overlap(other, live):
                self._report.refuses(
                    name,
                    f"overlaps in part with {other_name} in the state, and the checkpoint has one tensor for both; "
                    f"clone one of them, or restore one with only=[...]",
                )
                return False
        targets.append((live, name))
        return True

    def _target(
        self, position: int, live: torch.Tensor, name: str, block: TensorPiece | None = None
    ) -> None:
        flat = tensors.as_bytes(live)
        if flat is not None and block is not None:
            self._builder.add_block(position, flat, block.offset, tuple(live.shape))
            return
        if flat is not None:
            self._builder.add_target(position, flat)
            return
        if tensors.shares_memory(live):
            self._report.refuses(
                name, "cannot be restored into: its elements share memory; clone it first"
            )
            return
        if block is not None:
            temporary = torch.empty(live.nbytes, dtype=torch.uint8, device=live.device)
            self._builder.add_block(position, temporary, block.offset, tuple(live.shape))
        else:
            temporary = self._builder.flat(position, live.device)
        self.copies.append(lambda: tensors.fill_whole(live, temporary))


def _class_of(live: torch.Tensor) -> str:
    return f"{type(live).__module__}.{type(live).__qualname__}"


def _describe(dtype: torch.dtype, shape: tuple[int, ...], piece: TensorPiece | None) -> str:
    where = "" if piece is None else f", of which this rank has {piece.lengths} at {piece.offset}"
    return f"{dtypes.name_of(dtype)} {shape}{where}"
