"""Fitting stored tensors into tensors that are there: the same dtype and shape, in place.

A target whose elements do not lie in order gets its bytes through a temporary. Targets that are one memory are filled
once; one memory that two stored tensors would go into is refused, since which one came last would be chance. So are two
targets of one stored tensor that overlap in part: they cannot both hold its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tierfall.core.image.tree import QuantizedNode
from tierfall.core.load.build import CPU, Builder
from tierfall.core.load.mismatch import MismatchReport
from tierfall.core.tensors import dtypes, tensors
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
    """Notes targets with the builder, and what is left to do once they are filled."""

    def __init__(self, builder: Builder, report: MismatchReport) -> None:
        self._builder = builder
        self._report = report
        self._claims: dict[int, list[tuple[torch.Tensor, int, str]]] = {}
        self._targets: dict[int, list[tuple[torch.Tensor, str]]] = {}
        self._kept: list[tuple[torch.Tensor, str]] = []
        self.copies: list[Callable[[], None]] = []
        self.checks: list[Callable[[], None]] = []
        """What is to be looked at once all copies are made."""

    def compare(self, slot: int, live: torch.Tensor, name: str) -> bool:
        """Say whether dtype and shape are the same; report it where they are not."""
        stored = self._builder.header.tensors[slot]
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

    def tensor(self, slot: int, live: torch.Tensor, name: str) -> None:
        """Fill ``live`` from a slot, in place; of a tensor of several ranks this rank's part."""
        if is_sharded(live):
            if self.compare(slot, live, name):
                local, piece = local_part(live)
                self._local(slot, local, name, piece if self._builder.header.merged else None)
            return
        reason = tensors.refusal(live)
        if reason is not None:
            self._report.refuses(name, f"cannot be restored into: {reason}")
        elif self.compare(slot, live, name) and self._claim(slot, live, name):
            self._target(slot, live.detach(), name)

    def _local(self, slot: int, live: torch.Tensor, name: str, block: TensorPiece | None) -> None:
        reason = tensors.refusal(live)
        if reason is not None:
            self._report.refuses(name, f"cannot be restored into: {reason}")
        elif self._claim(slot, live, name):
            self._target(slot, live.detach(), name, block)

    def quantized(self, node: QuantizedNode, live: torch.Tensor, name: str) -> None:
        """Fill a quantized tensor from a slot, and give it the stored scale and zero point."""
        if not self.compare(node.slot, live, name):
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
            # Not copy_: it knows half of the schemes. The object stays, with new memory.
            live.data = built

        self.copies.append(copy)

    def in_place(self) -> Iterator[LiveMemory]:
        """The tensors that bytes are read straight into, before all of them are known to be good."""
        for targets in self._targets.values():
            for live, name in targets:
                if tensors.as_bytes(live) is not None:
                    yield LiveMemory(name, AddressRange.of(live))

    def skip(self, live: object, name: str) -> None:
        """Note what a caller wants to stay as it is."""
        if isinstance(live, torch.Tensor):
            self._kept.append((local_tensor(live), name))

    def check_overlaps(self) -> None:
        """Have targets that are filled from different slots, and overlap in part, compared once all are filled: both
        can be right only where the checkpoint has the same bytes twice."""
        stored = self._builder.header.tensors
        spans = [
            (str(live.device), *tensors.span(live), slot, live, name)
            for claims in self._claims.values()
            for live, slot, name in claims
            if tensors.as_bytes(live) is not None and live.nbytes == stored[slot].length
        ]
        spans.sort(key=lambda span: span[:3])
        overlapping: dict[str, tuple[int, torch.Tensor, str]] = {}
        last = None  # of those before on this device, the one that ends last
        for span in spans:
            device, start, end, slot, live, name = span
            if last is None or device != last[0] or start >= last[2]:
                last = span
                continue
            overlapping.setdefault(last[5], (last[3], last[4], name))
            overlapping.setdefault(name, (slot, live, last[5]))
            last = span if end > last[2] else last
        for name, (slot, live, other) in overlapping.items():
            self._compare_filled(slot, live, name, other)

    def _compare_filled(self, slot: int, live: torch.Tensor, name: str, other: str) -> None:
        stored = self._builder.flat(slot, CPU)

        def compare() -> None:
            flat = tensors.as_bytes(live.detach())
            if flat is None or not torch.equal(flat.cpu(), stored):
                raise RestoreError(
                    f"restore: {name} overlaps in part with {other} in the state, and the checkpoint has other values "
                    "for both; clone one of them, or restore one with only=[...]"
                )

        self.checks.append(compare)

    def check_kept(self) -> None:
        """Report what is to stay as it is, and is memory that is filled under another name."""
        for kept, name in self._kept:
            if kept.layout is not torch.strided or not kept.numel():
                continue
            for _, _, other in self._claims.get(kept.data_ptr(), ()):
                self._report.refuses(
                    name,
                    f"shares its memory with {other}, which is restored, and skip leaves it as it is: skip both, or "
                    "neither",
                )

    def _claim(self, slot: int, live: torch.Tensor, name: str) -> bool:
        """Say whether this memory is still to be filled."""
        if not live.numel():
            return False
        claims = self._claims.setdefault(live.data_ptr(), [])
        for other, other_slot, other_name in claims:
            if not tensors.same_memory(other, live):
                continue
            if other_slot != slot and self._report.strict:
                self._report.refuses(
                    name,
                    f"shares its memory with {other_name} in the state, and is stored apart from it; untie them, or "
                    f"pass strict=False to take {other_name}",
                )
            return False
        claims.append((live, slot, name))
        return self._is_apart(slot, live, name)

    def _is_apart(self, slot: int, live: torch.Tensor, name: str) -> bool:
        """Say whether ``live`` shares no memory with the slot's other targets; report it where it does."""
        targets = self._targets.setdefault(slot, [])
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
        self, slot: int, live: torch.Tensor, name: str, block: TensorPiece | None = None
    ) -> None:
        flat = tensors.as_bytes(live)
        if flat is not None and block is not None:
            self._builder.add_block(slot, flat, block.offset, tuple(live.shape))
            return
        if flat is not None:
            self._builder.add_target(slot, flat)
            return
        if tensors.shares_memory(live):
            self._report.refuses(
                name, "its elements share memory: it cannot be restored into; clone it first"
            )
            return
        if block is not None:
            temporary = torch.empty(live.nbytes, dtype=torch.uint8, device=live.device)
            self._builder.add_block(slot, temporary, block.offset, tuple(live.shape))
        else:
            temporary = self._builder.flat(slot, live.device)
        self.copies.append(lambda: tensors.fill_whole(live, temporary))


def _describe(dtype: torch.dtype, shape: tuple[int, ...], piece: TensorPiece | None) -> str:
    where = "" if piece is None else f", of which this rank has {piece.lengths} at {piece.offset}"
    return f"{dtypes.name_of(dtype)} {shape}{where}"
