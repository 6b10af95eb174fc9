"""Tensors whose class has ``__tensor_flatten__``, such as torchao's quantized weights and optimizer states.

Such a wrapper is saved by its inner tensors, a context (any value that has a codec), and its size and stride. Its class
is found by module and qualified name among the modules that are imported already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierfall.core.tensors import builtin_codecs, value_codec
from tierfall.core.tensors.builtin_codecs import NotEncodableError
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.errors import RestoreError

_OF_TORCH = frozenset({"AsyncCollectiveTensor", "DTensor", "FunctionalTensor", "NestedTensor"})
"""Classes of torch that have the methods, and are not saved by their inner tensors."""
_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class WrapperParts:
    """The parts of one wrapper: its class by its name in a checkpoint, its inner tensors by attribute, and the encoded
    list of context, size and stride."""

    class_name: str
    tensors: dict[str, torch.Tensor]
    coded: Coded

    def has_context(self, coded: Coded) -> bool:
        """Whether context, size and stride equal encoded ones."""
        return _text(self.coded) == _text(coded)


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that is saved by its inner tensors. A codec of the user's has precedence."""
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter or not _has_methods(kind):
        return False
    is_torchs = kind.__name__ in _OF_TORCH and kind.__module__.startswith("torch.")
    return not is_torchs and value_codec.codec_for(kind) is None


def _has_methods(kind: type) -> bool:
    return (
        issubclass(kind, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def take_apart(tensor: Any) -> WrapperParts:
    """Return the parts of a wrapper; the inner tensors share its memory. NotEncodableError if it cannot be saved."""
    kind = type(tensor)
    name = builtin_codecs.class_name(kind)
    title = builtin_codecs.class_title(name)
    attributes, context = tensor.__tensor_flatten__()
    inner = {attribute: getattr(tensor, attribute) for attribute in attributes}
    for attribute, each in inner.items():
        if not isinstance(each, torch.Tensor):
            raise NotEncodableError(f"{attribute} of {title} is not a tensor")
        if hasattr(each, "device_mesh"):
            raise NotEncodableError(
                f"{attribute} of {title} is sharded (DTensor); wrappers are saved whole"
            )
    shape = [list(tensor.shape), list(tensor.stride())]
    try:
        coded = value_codec.encode_atom([context, *shape], 1)
    except NotEncodableError as error:
        raise NotEncodableError(f"the context of {title} cannot be encoded: {error}") from error
    return WrapperParts(name, inner, coded)


def inner_tensors(tensor: torch.Tensor, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors that have a wrapper's memory; any other tensor itself."""
    if depth > _DEPTH_MAX or not is_wrapper(tensor):
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from inner_tensors(getattr(tensor, attribute), depth + 1)


def find_wrapper(name: str) -> Any:
    """Return the class of a wrapper by its name in a checkpoint; None if no imported module has it."""
    found = builtin_codecs.find_class(name)
    return found if found is not None and _has_methods(found) else None


def put_together(kind: Any, inner: dict[str, torch.Tensor], shape: Any) -> torch.Tensor:
    """Return the wrapper of a class with these inner tensors; ``shape`` is the decoded list of context, size and
    stride. RestoreError if the class raises."""
    context, size, stride = shape
    try:
        made: torch.Tensor = kind.__tensor_unflatten__(
            inner, context, torch.Size(size), tuple(stride)
        )
    except Exception as error:
        raise RestoreError(
            f"its __tensor_unflatten__ raised {type(error).__name__}: {error}"
        ) from error
    return made


def _text(coded: Coded) -> str:
    return json.dumps(coded, sort_keys=True)
