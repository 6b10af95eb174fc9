"""One tensor as bytes: which tensors an image takes, their flat bytes without a copy, and with one.

It knows torch's kinds of tensor and nothing of states, names or layouts.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tierfall.core.tensors import dtypes

UNSCALED = (
    "a quantized tensor without a scale has no values; make it with torch.quantize_per_tensor"
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes of integers, by their size in bytes."""


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why an image cannot take this tensor, or None."""
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
    """Return how many bytes from a plain tensor's address on are its own, without gaps: all of it, its first element
    where it has gaps, and nothing where its storage has been freed."""
    if not tensor.numel() or _is_cut_off(tensor):
        return 0
    if tensor.is_contiguous() or are_dense(tensor.shape, tensor.stride()):
        return dtypes.byte_count(tensor.dtype, tensor.shape)
    return tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    """How many elements lie from the first to the last of a tensor that is not empty, both included."""
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
    return f"tensors of class {kind.__module__}.{kind.__qualname__} cannot be saved; convert it to a plain tensor"


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Say whether a tensor, stored as ``dtype``, can be copied as it is: its elements lie one after the other as they
    read."""
    return (
        tensor.dtype is dtype
        and dtypes.code_of(dtype) is not None
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not contiguous and yet fills its memory from the first element to the
    last, each once, as one in channels-last format does; None for every other."""
    if tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    strides = tuple(tensor.stride())
    return strides if are_dense(tensor.shape, strides) else None


def are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether elements of ``shape``, with these strides, fill a span of memory, each place once."""
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
    """Return the bytes of ``tensor`` as a flat uint8 view of its memory.

    None where its elements do not lie one after the other as they read: not contiguous, conjugated, negated. A
    quantized tensor gives its integers.
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
        # of one element or none, whose stride means nothing, but is asked for below
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def _over_storage(tensor: torch.Tensor) -> torch.Tensor:
    # A fresh tensor over the same storage: views of quantized tensors stay quantized, and those of inference tensors
    # cannot be written.
    start = tensor.storage_offset() * tensor.element_size()
    length = dtypes.byte_count(tensor.dtype, tensor.shape)
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), start, (length,))  # type: ignore[call-overload, no-any-return]


def copy_whole(target: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy any tensor that an image takes into ``target``, flat uint8 of its contiguous size, bit for bit.

    Not-a-number payloads survive; a lazily conjugated or negated tensor is written as it reads.
    """
    with torch.no_grad():
        flat = as_bytes(tensor)
        if flat is not None:
            target.copy_(flat, non_blocking=non_blocking)
            return
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.is_quantized:
            tensor = tensor.contiguous()
        flat = as_bytes(tensor)
        if flat is not None:
            target.copy_(flat, non_blocking=non_blocking)
            return
        source = as_integers(tensor)
        if target.storage_offset() % source.element_size():
            flat = source.contiguous().view(-1).view(torch.uint8)
            target.copy_(flat, non_blocking=non_blocking)
        else:
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=non_blocking)


def fill_whole(target: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy flat contiguous bytes into a tensor that has no flat view: the inverse of ``copy_whole``.

    ``flat`` starts at the beginning of its storage.
    """
    with torch.no_grad():
        target = target.detach()
        if target.is_conj() or target.is_neg():
            # Written as it reads; torch turns it into what lies below.
            target.copy_(flat.view(target.dtype).view(target.shape))
            return
        if target.is_inference():
            target = _writable(target)
        integers = as_integers(target)
        integers.copy_(flat.view(integers.dtype).view(integers.shape))


def strided_copy(source: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Copy a contiguous tensor, which begins its storage, into one with these strides, bit for bit."""
    integers = INTEGERS.get(source.element_size())
    made = torch.empty_strided(
        source.shape, strides, dtype=integers or source.dtype, device=source.device
    )
    made = made if integers is None else made.view(source.dtype)
    fill_whole(made, source.view(-1).view(torch.uint8))
    return made


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty(0, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
    return fresh.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as integers of the size of its elements, of half that where there are none: every
    dtype copies then, the sub-byte shells too, and no bit changes."""
    bits = INTEGERS.get(tensor.element_size())
    return torch.view_as_real(tensor).view(torch.int64) if bits is None else tensor.view(bits)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Say whether elements of ``tensor`` may share memory: it is expanded, or a view that overlaps itself."""
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
    """Say whether two tensors that start at one address are aliases: each element the same memory, read the same."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether the spans of memory of two tensors, each from its first to its last element, have bytes in common."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = span(one), span(other)
    return start < other_end and other_start < end


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor that is not empty begins and ends."""
    start = tensor.data_ptr()
    return start, start + _reach(tensor) * tensor.element_size()


def unshared(made: Mapping[str, Any], keys: Sequence[str]) -> frozenset[str]:
    """Of the tensors at some keys of a dict, return the keys of those that the dict alone holds, and their memory
    alone: once nobody but the caller has the dict, nobody can change them. Where that is not sure, a key is left out.
    """
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
"""References to a dict that its maker's caller holds in a variable: that one, the parameter, and the one of the
question."""
_HELD_TENSOR = 3
"""References to a tensor that one dict holds: that one, the loop's variable, and the one of the question."""


def _holds_memory_alone(tensor: torch.Tensor) -> bool:
    """Say whether this tensor alone holds its memory: no alias in Python or below, no lender, no other process."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if getattr(tensor, "_use_count", _unknown)() != 1:
        return False
    storage = tensor.untyped_storage()
    if sys.getrefcount(storage) > _HELD_STORAGE or weakref.getweakrefcount(tensor):
        return False
    alone = storage_uses(storage) == 1
    return alone and storage.resizable() and not (tensor.is_cpu and storage.is_shared())


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold a storage, with others below Python."""
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1  # without the Python object through which is asked


# The counts hold for CPython up to 3.13: later versions do not count references of local variables.
_HELD_STORAGE = 3
"""References to that object: the storage's own, the variable, and the one of the question."""


def _unknown() -> int:
    """How often a tensor is used, where this version of torch does not tell."""
    return sys.maxsize
