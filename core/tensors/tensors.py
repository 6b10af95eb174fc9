"""Single tensors as bytes: which can be saved, byte views without a copy, bitwise copies, aliases and overlaps.

This module knows nothing of states, names or layouts.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from tierfall.core.tensors import dtypes

UNSCALED = (
    "a quantized tensor without a scale has no values; make it with torch.quantize_per_tensor"
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype for each element size in bytes, for bitwise copies."""


def refusal(tensor: torch.Tensor) -> str | None:
    """The reason why this tensor cannot be saved, or None."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return _refuse_subclass(kind)
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be saved; save its dense parts instead"
    if tensor.is_nested:
        return "a nested tensor cannot be saved; save its components instead"
    if tensor.is_meta:
        return "a meta tensor has no data; materialise it first (for a module: to_empty)"
    if _is_cut_off(tensor):
        return "the storage of this tensor has been freed, or is shorter than the tensor"
    return None


def _is_cut_off(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or dtypes.is_packed(tensor.dtype):
        return False
    return (tensor.storage_offset() + _reach(tensor)) * tensor.element_size() > (
        tensor.untyped_storage().nbytes()
    )


def readable_bytes(tensor: torch.Tensor) -> int:
    """How many bytes from a plain tensor's address on belong to it without gaps: all, or its first element if its
    strides leave gaps, or 0 if its storage was freed."""
    if not tensor.numel() or _is_cut_off(tensor):
        return 0
    if tensor.is_contiguous() or are_dense(tensor.shape, tensor.stride()):
        return dtypes.byte_count(tensor.dtype, tensor.shape)
    return tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    """The distance from the first to the last element of a non-empty tensor, both included, in elements."""
    return 1 + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _refuse_subclass(kind: type[torch.Tensor]) -> str:
    if kind.__name__ == "ShardedTensor" and kind.__module__.startswith("torch."):
        return "ShardedTensor is not supported; use DTensor, or save its local tensor"
    if issubclass(
        kind, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer
    ):
        return "an uninitialized parameter has no data; run the module once before"
    if kind.__name__ == "NestedTensor":
        return "a nested tensor cannot be saved; save its components instead"
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(kind, "__tensor_flatten__"):
        return (
            f"tensors of class {name} cannot be saved here: a sharded tensor (DTensor, FSDP2), or one of dcp.save, has "
            "to be of plain tensors"
        )
    return f"tensors of class {name} cannot be saved; convert it to a plain tensor"


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's memory equals its bytes in an image, where ``dtype`` is stored: contiguous, without a lazy
    conjugation or negation, of a dtype that safetensors has."""
    return (
        tensor.dtype is dtype
        and dtypes.code_of(dtype) is not None
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense but not contiguous, such as channels-last; None for any other."""
    if tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    strides = tuple(tensor.stride())
    return strides if are_dense(tensor.shape, strides) else None


def are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of ``shape`` with these strides fill a memory span without gaps or overlaps."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A flat uint8 view of a tensor's memory, for a quantized one of its integers.

    None if the memory differs from the elements in order: not contiguous, lazily conjugated or negated.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_quantized or tensor.is_inference():
        return _over_storage(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    if tensor.stride(0) != 1:
        # One element or none: the stride has no meaning, but ``view`` checks it.
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of any tensor that can be saved, flat uint8 on its own device: a view, or a copy."""
    return _bytes_or_integers(tensor).contiguous().view(-1).view(torch.uint8)


def _bytes_or_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The flat bytes of any tensor that can be saved; integers in its shape, if its memory is not contiguous."""
    flat = as_bytes(tensor)
    if flat is None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        flat = as_bytes(tensor.contiguous() if tensor.is_quantized else tensor)
    return as_integers(tensor) if flat is None else flat


def _over_storage(tensor: torch.Tensor) -> torch.Tensor:
    # A new tensor over the same storage: a view of a quantized tensor is quantized, and one of an inference tensor
    # cannot be written to.
    start = tensor.storage_offset() * tensor.element_size()
    length = dtypes.byte_count(tensor.dtype, tensor.shape)
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), start, (length,))  # type: ignore[call-overload, no-any-return]


def copy_whole(target: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy any tensor that can be saved into ``target``, flat uint8 of its contiguous size, bit for bit.

    NaN payloads are preserved; a lazy conjugation or negation is resolved.
    """
    with torch.no_grad():
        source = _bytes_or_integers(tensor)
        if target.storage_offset() % source.element_size():
            source = source.contiguous().view(-1).view(torch.uint8)
        target.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)


def fill_whole(target: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy flat contiguous bytes into a tensor that has no flat view: the inverse of ``copy_whole``.

    ``flat`` starts at the beginning of its storage.
    """
    with torch.no_grad():
        target = target.detach()
        if target.is_conj() or target.is_neg():
            # copy_ applies the lazy conjugation or negation to the memory.
            target.copy_(flat.view(target.dtype).view(target.shape))
            return
        if target.is_inference():
            target = view_like(target, target.untyped_storage(), int(target.storage_offset()))
        integers = as_integers(target)
        integers.copy_(flat.view(integers.dtype).view(integers.shape))


def strided_copy(source: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy a contiguous tensor, which starts at the beginning of its storage, to a new one with these strides, bit for
    bit."""
    integers = INTEGERS.get(source.element_size())
    made = torch.empty_strided(
        source.shape, strides, dtype=integers or source.dtype, device=source.device
    )
    made = made if integers is None else made.view(source.dtype)
    fill_whole(made, source.view(-1).view(torch.uint8))
    return made


def view_like(tensor: torch.Tensor, storage: torch.UntypedStorage, at: int) -> torch.Tensor:
    """A new tensor over a storage, as ``tensor`` is over its own: element ``at`` is the first."""
    fresh = torch.empty(0, dtype=torch.uint8, device=storage.device).view(tensor.dtype)
    return fresh.set_(storage, at, tensor.shape, tensor.stride())


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as integers of its element size (complex128: two int64). Integers copy bit for bit, and
    every dtype, including the sub-byte shells, has such a view."""
    bits = INTEGERS.get(tensor.element_size())
    return torch.view_as_real(tensor).view(torch.int64) if bits is None else tensor.view(bits)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` may share memory: it is expanded, or a view that overlaps itself."""
    spans = sorted(
        (stride, length)
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
        if length > 1
    )
    reach = 1
    for stride, length in spans:
        if stride < reach:
            return True
        reach = stride * (length - 1) + reach
    return False


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that start at one address are aliases: same elements, interpreted the same way."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory spans of two tensors, from first to last element, have bytes in common."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = span(one), span(other)
    return start < other_end and other_start < end


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Start and end address of a non-empty tensor's memory."""
    start = tensor.data_ptr()
    return start, start + _reach(tensor) * tensor.element_size()


def unshared(made: Mapping[str, Any], keys: Sequence[str]) -> frozenset[str]:
    """The keys, among ``keys``, of tensors that nothing but this dict references, and whose memory nothing else uses.
    If only the caller has the dict, no other code can change them. Uncertain ones are omitted."""
    if type(made) not in (dict, OrderedDict) or sys.getrefcount(made) > _HELD_DICT:
        return frozenset()
    found = set()
    for key in keys:
        tensor = made[key]
        if not isinstance(tensor, torch.Tensor) or sys.getrefcount(tensor) > _HELD_TENSOR:
            continue
        if _holds_memory_alone(getattr(tensor, "_local_tensor", tensor)):
            found.add(key)
    return frozenset(found)


_HELD_DICT = 3
"""References to a dict that only our caller has: its variable, our parameter, and the argument of getrefcount."""
_HELD_TENSOR = 3
"""References to a tensor that only the dict has: the dict's, the loop variable, and the argument of getrefcount."""


def _holds_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else uses this tensor's memory: no alias in Python or C++, no external owner, no other
    process."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if getattr(tensor, "_use_count", _unknown)() != 1:
        return False
    storage = tensor.untyped_storage()
    if sys.getrefcount(storage) > _HELD_STORAGE or weakref.getweakrefcount(tensor):
        return False
    is_only = storage_uses(storage) == 1
    return is_only and storage.resizable() and not (tensor.is_cpu and storage.is_shared())


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors use a storage, including those in C++."""
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1  # without the Python object ``storage``


# The counts hold for CPython up to 3.13: later versions do not count references of local variables.
_HELD_STORAGE = 3
"""References to the storage object: the storage's own, our variable, and the argument of getrefcount."""


def _unknown() -> int:
    """The use count where this version of torch has no ``_use_count``."""
    return sys.maxsize


def laid_out_as(parameter: Any, built: Any) -> Any:
    """Return state with the strides of its parameter."""
    if type(built) is not torch.Tensor or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return built
    strides = dense_strides(parameter)
    if strides is None or built.shape != parameter.shape or not built.is_contiguous():
        return built
    return strided_copy(built, strides)


class AddressRange(NamedTuple):
    """Addresses ``start`` to ``end`` on a device."""

    device: torch.device
    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The range from the first to the last element of a non-empty tensor."""
        return cls(tensor.device, *span(tensor))


class AddressRanges:
    """A set of addresses, as disjoint ranges by device."""

    def __init__(self, ranges: Iterable[AddressRange]) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._ends: dict[torch.device, list[int]] = {}
        for device, start, end in sorted(ranges, key=lambda r: (str(r.device), r.start)):
            starts, ends = self._starts.setdefault(device, []), self._ends.setdefault(device, [])
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)

    def overlaps(self, range: AddressRange) -> bool:
        """Whether any address of a range is in the set."""
        ends = self._ends.get(range.device, [])
        at = bisect_right(ends, range.start)
        return at < len(ends) and self._starts[range.device][at] < range.end

    def contains(self, range: AddressRange) -> bool:
        """Whether all addresses of a range are in the set."""
        starts = self._starts.get(range.device, [])
        at = bisect_right(starts, range.start) - 1
        return at >= 0 and range.end <= self._ends[range.device][at]
