"""Matching stored tensors to tensors of the state: same dtype and shape, filled in place.

A target whose elements are not contiguous is filled through a temporary. Targets that share all of their memory and are
one tensor in the checkpoint are filled once. Other targets that share memory, NumPy arrays among them, must agree in
their stored bytes there, else the result would depend on their order: these bytes are read ahead, and compared before
anything is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from tierfall.core.image.header import StoredTensor
from tierfall.core.image.tree import (
    TENSORS,
    Node,
    QuantizedNode,
    TensorNode,
    WrapperNode,
    positions_of,
)
from tierfall.core.load.build import BlockTarget, Builder
from tierfall.core.load.mismatch import MismatchReport
from tierfall.core.tensors import builtin_codecs, dtypes, numpy_values, tensors, wrappers
from tierfall.core.tensors.dtensor import (
    LocalBlocks,
    NotOneBlockError,
    TensorPiece,
    local_part,
    local_tensor,
    piece_of,
)
from tierfall.core.tensors.tensors import AddressRange, AddressRanges
from tierfall.core.types.errors import RestoreError

_GENERATOR_BYTES = 1 << 14
"""More than the state of any generator."""
_ALIGNMENT = 16
"""Bytes: the largest element of a tensor."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A target: memory of the state, which a stored tensor fills."""

    live: torch.Tensor
    position: int
    name: str
    piece: TensorPiece | None = None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Targets of one device that overlap, with their stored bytes: ``copies``, by position."""

    claims: tuple[_Claim, ...]
    copies: Mapping[int, torch.Tensor]

    @property
    def targets(self) -> list[BlockTarget]:
        return [BlockTarget(position=at, target=copy) for at, copy in self.copies.items()]

    def __str__(self) -> str:
        return ", ".join(claim.name for claim in self.claims) + " share memory in the state"

    def check(self) -> None:
        """Raise RestoreError unless all targets can hold their stored bytes at the same time."""
        start = min(tensors.span(claim.live)[0] for claim in self.claims) & -_ALIGNMENT
        end = max(tensors.span(claim.live)[1] for claim in self.claims)
        memory = torch.empty(end - start, dtype=torch.uint8).untyped_storage()
        places = [(c.live.data_ptr() - start) // c.live.element_size() for c in self.claims]
        views = [
            tensors.view_like(claim.live, memory, at)
            for claim, at in zip(self.claims, places, strict=True)
        ]
        for claim, view in zip(self.claims, views, strict=True):
            tensors.fill_whole(view, self.copies[claim.position])
        for claim, view in zip(self.claims, views, strict=True):
            if not torch.equal(tensors.to_bytes(view), self.copies[claim.position]):
                raise RestoreError(f"restore: {claim.name} {_conflict(claim, self.claims)}")


class TensorMatcher:
    """Adds targets to the builder, and collects what to do once they are filled: ``copies``."""

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
        self._claims: dict[int, list[_Claim]] = {}
        self._untied: list[_Claim] = []
        """Aliases of targets that are a tensor of their own in the checkpoint."""
        self._filled: set[int] = set()
        self._values: list[_Claim] = []
        self._generators: dict[int, torch.Tensor] = {}
        self._written: list[torch.Tensor] = []
        # as load_state_dict does: autograd raises if a backward pass needs the old values
        count_writes = torch.autograd.graph.increment_version
        self.copies: list[Callable[[], None]] = [lambda: count_writes(tuple(self._written))]

    def fill(self, node: Node, live: torch.Tensor, name: str) -> None:
        """Fill ``live`` from a stored tensor of any kind, in place."""
        match node:
            case QuantizedNode():
                self.quantized(node, live, name)
            case WrapperNode():
                self._wrapper(node, live, name)
            case TensorNode():
                self.tensor(node.position, live, name)

    def compare(self, position: int, live: Any, name: str, resize: str = "") -> bool:
        """Return whether dtype and shape are equal; report the mismatch where they are not. ``resize``: it is an
        optimizer's state of the parameter of that name."""
        stored = self._builder.header.tensors[position]
        try:
            piece = piece_of(live)
        except NotOneBlockError as error:
            self._report.refuses(name, f"cannot be restored into: {error}")
            return False
        shape = stored.whole_shape
        same = piece == stored.piece or self._builder.header.merged
        if live.dtype is stored.dtype and tuple(live.shape) == shape and same:
            return True
        is_resizable = tuple(live.shape) != shape and can_resize(stored, live)
        # state of an optimizer may have another one
        same_dtype = bool(resize) or live.dtype is stored.dtype
        self._report.differs(
            name,
            _describe(stored.dtype, shape, stored.piece),
            _describe(live.dtype, tuple(live.shape), piece),
            resize=(resize or name) if is_resizable and same_dtype else "",
            dtype="" if same_dtype else dtypes.name_of(live.dtype),
        )
        return False

    def tensor(self, position: int, live: Any, name: str) -> None:
        """Fill ``live`` from a stored tensor, in place; of a sharded tensor, this rank's block. It may be one block."""
        if self._resizes(name) and self._resize(position, live, name):
            return
        self._written.append(live.parts[0][0] if isinstance(live, LocalBlocks) else live)
        if wrappers.is_wrapper(live):
            self._report.differs(name, "a plain tensor", f"one of {_class_of(live)}")
            return
        reason = tensors.refusal(local_tensor(live))
        if reason is not None:
            self._report.refuses(name, f"cannot be restored into: {reason}")
        elif self.compare(position, live, name):
            local, piece = local_part(live)
            if self._claim(position, local, name, piece):
                block = piece if self._builder.header.merged else None
                self._target(position, local.detach(), name, block)

    def _resize(self, position: int, live: Any, name: str) -> bool:
        """Fill what a tensor of another shape has in common with the stored one; False where the shapes are equal, or
        more differs than they."""
        stored = self._builder.header.tensors[position]
        if wrappers.is_wrapper(live) or tensors.refusal(local_tensor(live)) is not None:
            return False
        if tuple(live.shape) == stored.whole_shape or live.dtype is not stored.dtype:
            return False
        if not can_resize(stored, live):
            return False
        local, offset = part_of(live)
        if self._claim(position, local, name):
            self._resized.add(name)
            self.copies.append(plan_common(self._builder, position, local.detach(), offset))
        return True

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
        make = self._builder.prepare(node, live.device)

        def copy() -> None:
            # copy_ does not support all schemes. The tensor object stays and gets new memory.
            live.data = make()

        self.copies.append(copy)

    def _wrapper(self, node: WrapperNode, live: torch.Tensor, name: str) -> None:
        """Fill the inner tensors of a wrapper, once class, context, size and stride were compared."""
        self._written.append(live)
        stored_class = builtin_codecs.class_title(node.class_name)
        if not wrappers.is_wrapper(live) or builtin_codecs.find_class(node.class_name) is not type(
            live
        ):
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

    def in_place(self) -> dict[AddressRange, str]:
        """Return the names of the tensors that are read into directly, before all bytes are verified, by their
        memory."""
        return {
            AddressRange.of(claim.live): claim.name
            for claim in self._all_claims()
            if claim.name not in self._resized and tensors.as_bytes(claim.live) is not None
        }

    def _all_claims(self) -> Iterator[_Claim]:
        return chain.from_iterable(self._claims.values())

    def share(self, position: int, live: object, name: str) -> None:
        """Record an array or a generator that is set to stored bytes after the tensors are filled. Bytes stand for the
        memory of a generator."""
        memory = None
        length = self._builder.header.tensors[position].length
        if isinstance(live, torch.Generator) and not self._builder.header.merged:
            whole = torch.empty(_GENERATOR_BYTES, dtype=torch.uint8)
            memory = self._generators.setdefault(id(live), whole)[:length]
        elif numpy_values.is_array(live):
            memory = numpy_values.memory_of(live)
        if memory is not None and memory.nbytes == length and self._report.strict:
            self._values.append(_Claim(memory, position, name))

    def check_kept(self, kept: Iterable[tuple[str, object]]) -> None:
        """Report those of ``kept``, tensors that the caller skips, whose memory is filled under another name."""
        claims = [*self._all_claims(), *self._values]
        filled = AddressRanges(
            AddressRange.of(claim.live) for claim in claims if claim.live.numel()
        )
        for name, live in kept:
            for part in _memory_of(live):
                if tensors.refusal(part) is not None or not part.numel():
                    continue
                if filled.overlaps(AddressRange.of(part)):
                    other = next(c.name for c in claims if tensors.overlap(c.live, part))
                    self._report.refuses(name, kept_by_skip("memory", other))

    @property
    def fills_any(self) -> bool:
        """Whether a tensor of the state is filled."""
        return bool(self._filled)

    def has_filled(self, leaf: Node) -> bool:
        """Return whether the bytes of a stored tensor fill a target."""
        return isinstance(leaf, TENSORS) and self._filled.issuperset(positions_of(leaf))

    def has_memory(self, live: object) -> bool:
        """Return whether a tensor's memory is a target."""
        parts = _memory_of(live)
        return bool(parts) and all(
            tensors.refusal(part) is None
            and any(
                tensors.same_memory(claim.live, part)
                for claim in self._claims.get(part.data_ptr(), ())
            )
            for part in parts
        )

    def shared_memory(self) -> list[SharedMemory]:
        """Return the groups of targets that overlap, but for aliases that are one stored tensor; report those whose
        bytes cannot be compared before anything is filled."""
        claims = [*self._untied, *self._all_claims()]
        known = {(claim.live.data_ptr(), claim.position) for claim in claims}
        for claim in self._values:
            key = (claim.live.data_ptr(), claim.position)
            claims += () if key in known else (claim,)
            known.add(key)
        claims.sort(key=lambda claim: (str(claim.live.device), *tensors.span(claim.live)))
        groups: list[list[_Claim]] = []
        end = 0
        for claim in claims:
            low, high = tensors.span(claim.live)
            if groups and low < end and groups[-1][0].live.device == claim.live.device:
                groups[-1].append(claim)
                end = max(end, high)
            else:
                groups.append([claim])
                end = high
        shared = [group for group in groups if len(group) > 1]
        return [found for group in shared if (found := self._shared(group)) is not None]

    def _shared(self, claims: Sequence[_Claim]) -> SharedMemory | None:
        header = self._builder.header
        if header.merged or not all(map(self._is_comparable, claims)):
            known = "has a tensor of its own for it, which cannot be compared"
            self._report.refuses(claims[0].name, _conflict(claims[0], claims, known))
            return None
        lengths = {claim.position: header.tensors[claim.position].length for claim in claims}
        copies = {at: torch.empty(length, dtype=torch.uint8) for at, length in lengths.items()}
        return SharedMemory(tuple(claims), copies)

    def _is_comparable(self, claim: _Claim) -> bool:
        live = claim.live
        return claim.name not in self._resized and not live.is_conj() and not live.is_neg()

    def _claim(
        self, position: int, live: torch.Tensor, name: str, piece: TensorPiece | None = None
    ) -> bool:
        """Return whether ``live`` is to be filled: not if its memory is a target already."""
        self._filled.add(position)
        if not live.numel():
            return False
        claim = _Claim(live, position, name, piece)
        claims = self._claims.setdefault(live.data_ptr(), [])
        for other in claims:
            if tensors.same_memory(other.live, live):
                is_same = (other.position, other.piece) == (position, piece)
                if not is_same and self._report.strict:
                    self._untied.append(claim)
                return False
        claims.append(claim)
        return True

    def _target(
        self, position: int, live: torch.Tensor, name: str, block: TensorPiece | None = None
    ) -> None:
        flat = tensors.as_bytes(live)
        if flat is None and tensors.shares_memory(live):
            self._report.refuses(
                name, "cannot be restored into: its elements share memory; clone it first"
            )
            return
        if flat is None:
            flat = temporary = torch.empty(live.nbytes, dtype=torch.uint8, device=live.device)
            self.copies.append(lambda: tensors.fill_whole(live, temporary))
        part = {} if block is None else {"offset": block.offset, "lengths": tuple(live.shape)}
        self._builder.targets.append(BlockTarget(position=position, target=flat, **part))


def _memory_of(live: object) -> list[torch.Tensor]:
    """Return the plain tensors that have the memory of a tensor, a wrapper or blocks; of other values none."""
    if isinstance(live, LocalBlocks):
        return [tensor for tensor, _ in live.parts]
    inner = wrappers.inner_tensors(live) if isinstance(live, torch.Tensor) else ()
    return [*map(local_tensor, inner)]


def kept_by_skip(what: str, other: str) -> str:
    """Return the text of an error: a skipped entry shares what another one restores."""
    return f"shares its {what} with {other}, which is restored; skip cannot leave it unchanged: skip both, or neither"


def _conflict(
    claim: _Claim, claims: Sequence[_Claim], stored: str = "has other values for it"
) -> str:
    other = next(c for c in claims if c is not claim and tensors.overlap(c.live, claim.live))
    return (
        f"shares memory with {other.name} in the state, and the checkpoint {stored}: clone one of them, or restore one "
        "with only=[...]"
    )


def _class_of(live: torch.Tensor) -> str:
    return f"{type(live).__module__}.{type(live).__qualname__}"


def _describe(dtype: torch.dtype, shape: tuple[int, ...], piece: TensorPiece | None) -> str:
    where = "" if piece is None else f", of which this rank has {piece.lengths} at {piece.offset}"
    return f"{dtypes.name_of(dtype)} {shape}{where}"


# Tensors of another shape -------------------------------------------------------------------------
# Both have the same number of dimensions. The block that they have in common, at the low indices, is copied; the rest
# of the state's tensor keeps its values.


_ELEMENTWISE = frozenset(
    getattr(torch.optim, name, None)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
_PER_ELEMENT = frozenset(
    (
        *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
        *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
    )
)
"""Entries of those optimizers' state with the parameter's shape."""


def shape_of_state(
    optimizer: Optimizer,
    entry: Any,
    shape: tuple[int, ...],
    saved: StoredTensor | None,
    now: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the shape of state that was saved with ``shape``, for a parameter of the shape ``now``; ``saved`` is the
    parameter in the image, if that has it.

    Each dimension that is the parameter's follows it: those of state of the parameter's shape, and of a factor, in
    which others have length 1 or are left out. None if several dimensions fit, or none does.
    """
    if shape and type(optimizer) in _ELEMENTWISE and entry in _PER_ELEMENT:
        return now
    if not shape or saved is None or saved.whole_shape == now:
        return shape
    if saved.whole_shape == shape:
        return now
    if len(saved.whole_shape) != len(now):
        return None
    found = {*_factors(shape, saved.whole_shape, now)}
    return found.pop() if len(found) == 1 else None


def _factors(
    shape: tuple[int, ...], before: tuple[int, ...], now: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that a factor of ``shape`` of a parameter may have now."""
    if not before:
        if not shape:
            yield ()
        return
    yield from _factors(shape, before[1:], now[1:])  # without the first dimension
    for length, follows in ((before[0], now[0]), (1, 1)):
        if shape and shape[0] == length:
            yield from ((follows, *rest) for rest in _factors(shape[1:], before[1:], now[1:]))


def can_resize(stored: StoredTensor, live: torch.Tensor) -> bool:
    """Return whether a stored tensor can be copied into one of another shape: the number of dimensions is equal, and
    the image, or all images merged, have it whole."""
    if stored.is_quantized or len(stored.whole_shape) != len(live.shape):
        return False
    if stored.shape != stored.whole_shape:
        return False
    try:
        piece_of(live)
    except NotOneBlockError:
        return False
    return True


def part_of(live: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and its offset in the whole one."""
    local, piece = local_part(live)
    return local, (0,) * len(live.shape) if piece is None else piece.offset


def plan_common(
    builder: Builder, position: int, local: torch.Tensor, offset: tuple[int, ...]
) -> Callable[[], None]:
    """Plan to read a stored tensor, and return what copies the part that ``local``, at ``offset``, has in common with
    it."""
    whole = builder.tensor(position, local.device)
    ends = [min(o + n, end) for o, n, end in zip(offset, local.shape, whole.shape, strict=True)]
    source = tuple(slice(o, max(o, end)) for o, end in zip(offset, ends, strict=True))
    target = tuple(slice(0, max(0, end - o)) for o, end in zip(offset, ends, strict=True))

    def copy() -> None:
        with torch.no_grad():
            local[target].copy_(whole[source])

    return copy
