"""Python objects from an image: ``prepare`` allocates their memory before it is read, and returns what makes them
after.

Sizes are those of the header, which were checked against the size of the image. The same tensor of the image on one
device is one tensor object, so that tied tensors stay tied.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import (
    CodecNode,
    ConflictNode,
    MapNode,
    ModuleNode,
    Node,
    OptimizerNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    WrapperNode,
)
from tierfall.core.tensors import builtin_codecs, numpy_values, tensors, value_codec, wrappers
from tierfall.core.tensors.builtin_codecs import UnknownValue, ValueCodec
from tierfall.core.tensors.value_codec import MAPPING_TYPES, Contents
from tierfall.core.types.errors import IntegrityError, RestoreError

CPU = torch.device("cpu")
Make = Callable[[], Any]
"""Makes an object, once the bytes of its tensors are read."""
Lend = Callable[[int], torch.Tensor]
"""Returns the flat memory of a tensor, by its position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTarget:
    """Memory for one block of a tensor: flat ``target`` receives the block that begins at ``offset`` and has the shape
    ``lengths``; without these, the whole tensor."""

    position: int
    target: torch.Tensor
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A read: bytes ``start`` to ``end`` of an image's data are copied to each of the flat targets."""

    start: int
    end: int
    targets: tuple[torch.Tensor, ...]


class Builder:
    """Allocates and builds the objects of one header's tree, and collects the targets of each of its tensors."""

    def __init__(self, header: ImageHeader, lend: Lend | None = None) -> None:
        """``lend`` returns the memory of a tensor on the CPU, in place of new memory; it is no target."""
        self.header = header
        self._lend = lend
        self.targets: list[BlockTarget] = []
        """Of whole tensors and of blocks."""
        self._flat: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._typed: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._laid_out: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._codecs: dict[str, ValueCodec | None] = {}

    # ---- before the bytes

    def flat(self, position: int, device: torch.device) -> torch.Tensor:
        """Return the flat uint8 memory of a tensor, which is a target of it."""
        found = self._flat.get((position, device))
        if found is None:
            if self._lend is not None and device == CPU:
                return self._lend(position)
            length = self.header.tensors[position].length
            found = torch.empty(length, dtype=torch.uint8, device=device)
            self._flat[position, device] = found
            self.targets.append(BlockTarget(position=position, target=found))
        return found

    def tensor(self, position: int, device: torch.device) -> torch.Tensor:
        """Return the memory of a tensor in its dtype and shape."""
        found = self._typed.get((position, device))
        if found is None:
            stored = self.header.tensors[position]
            # A view, since allocating some dtypes raises a warning.
            found = self.flat(position, device).view(stored.dtype).view(stored.shape)
            self._typed[position, device] = found
        return found

    def laid_out(self, position: int, device: torch.device) -> torch.Tensor:
        """Return a tensor with the strides that it was saved with. Its bytes must have been read."""
        strides = self.header.tensors[position].strides
        if strides is None:
            return self.tensor(position, device)
        found = self._laid_out.get((position, device))
        if found is None:
            found = tensors.strided_copy(self.tensor(position, device), strides)
            self._laid_out[position, device] = found
        return found

    def prepare(self, node: Node, device: torch.device, named: str = "") -> Make:
        """Allocate the memory of a node; return what makes its object. ``named`` is the name of the node, for errors.

        Raises RestoreError where the ranks that saved the node differ in it, or where ``unknown`` does.
        """
        what = f"{self.header.what}: {named}"
        match node:
            case ConflictNode():
                raise RestoreError(f"{what}: {node.reason}")
            case PiecesNode():
                is_nowhere, elsewhere = (
                    self.header.merged,
                    "its bytes are in the images of other ranks",
                )
                raise RestoreError(
                    f"{what}: {'no rank has a block of it' if is_nowhere else elsewhere}"
                )
            case ValueNode():
                for position in node.blobs:
                    self.flat(position, CPU)
                contents = Contents(registered=self._check_named)
                value_codec.decode(self.header.values[node.number], contents)
                return lambda: self.value(node)
            case TensorNode():
                self.tensor(node.position, device)
                return lambda: self.laid_out(node.position, device)
            case QuantizedNode():
                self.flat(node.position, device)
        self._check_classes(node)
        below = CPU if isinstance(node, RandomNode) else device
        makes = [self.prepare(child, below, name) for name, child in node.named(named)]
        return lambda: self._from_parts(node, device, makes)

    def _check_classes(self, node: Node) -> None:
        match node:
            case CodecNode() if self.codec(node.name) is None:
                self.unknown(builtin_codecs.unknown_value(node.name, None))
            case MapNode():
                for key, _ in node.entries:
                    if type(key) is UnknownValue:
                        self.unknown(key)
            case WrapperNode():
                self._prepare_wrapper(node)

    def _check_named(self, name: str, value: object) -> object:
        """Check that the class or codec that a value names is there; the value has no contents yet."""
        if name.startswith(builtin_codecs.CLASSES) or self.codec(name) is None:
            return self.registered(name, value)
        return None

    # ---- after the bytes

    def _from_parts(self, node: Node, device: torch.device, makes: Sequence[Make]) -> Any:
        """Return the object of a prepared node; ``makes`` make those of its children."""
        if isinstance(node, WrapperNode):
            *inner, shape = makes
            parts = zip(node.attributes, (make() for make in inner), strict=True)
            return self._wrapper(node, dict(parts), shape)
        built = [make() for make in makes]
        match node:
            case MapNode():
                result = MAPPING_TYPES[node.kind]()
                for (key, _), value in zip(node.entries, built, strict=True):
                    result[key] = value
                return result
            case SequenceNode():
                return tuple(built) if node.is_tuple else built
            case ModuleNode():
                return OrderedDict(zip((key for key, _, _ in node.entries), built, strict=True))
            case OptimizerNode():
                return self._optimizer(node, built)
            case QuantizedNode():
                return self._quantized(node, device, built[0])
            case CodecNode():
                return self.registered(node.name, built[0])
        return built[0]  # of an object, or the random state

    def _optimizer(self, node: OptimizerNode, built: Sequence[Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": list(numbers)}
            for (numbers, _), group in zip(node.groups, built, strict=False)
        ]
        keys = (key if isinstance(key, int) else key[0] for key, _ in node.state)
        state = dict(zip(keys, built[len(groups) :], strict=True))
        return {"state": state, "param_groups": groups}

    def _quantized(
        self, node: QuantizedNode, device: torch.device, parameters: Any
    ) -> torch.Tensor:
        try:
            tensor = _empty_quantized(
                self.header.tensors[node.position], node, parameters, device=device
            )
        except (RuntimeError, TypeError) as error:
            raise IntegrityError(
                f"{self.header.what}: a quantized tensor's scale is damaged: {error}"
            ) from error
        flat = tensors.as_bytes(tensor)
        assert flat is not None, "a fresh tensor that is not contiguous"
        flat.copy_(self.flat(node.position, device))
        return tensor

    def _prepare_wrapper(self, node: WrapperNode) -> None:
        if wrappers.find_wrapper(node.class_name) is None:
            self.unknown(_unknown_wrapper(node, None))

    def _wrapper(self, node: WrapperNode, inner: dict[str, torch.Tensor], shape: Make) -> Any:
        kind = wrappers.find_wrapper(node.class_name)
        if kind is None:
            return self.unknown(_unknown_wrapper(node, inner))
        try:
            return wrappers.put_together(kind, inner, shape())
        except RestoreError as error:
            return self.unknown(_unknown_wrapper(node, inner, str(error)))

    # ---- values

    def value(self, node: ValueNode) -> Any:
        """Return a plain value; IntegrityError where its bytes cannot be decoded."""
        contents = Contents(partial(self._blob, node), self.registered)
        try:
            return value_codec.decode(self.header.values[node.number], contents)
        except ValueError as error:
            raise IntegrityError(f"{self.header.what}: a value is damaged: {error}") from error

    def _blob(self, node: ValueNode, number: int, kind: str, members: dict[str, Any]) -> object:
        flat = self.flat(node.blobs[number], CPU)
        match kind:
            case "bytes":
                return ctypes.string_at(flat.data_ptr(), flat.numel())
            case "str":
                return ctypes.string_at(flat.data_ptr(), flat.numel()).decode(
                    "utf-8", "surrogatepass"
                )
            case "array":
                return numpy_values.from_bytes(flat, members["d"], members["s"])
        return _generator(flat, torch.device(members["d"]))

    def codec(self, name: str) -> ValueCodec | None:
        """Return the codec of a name; None if it is not there."""
        if name not in self._codecs:
            self._codecs[name] = value_codec.codec_named(name)
        return self._codecs[name]

    def registered(self, name: str, value: object) -> object:
        """Return a value of a type that has a codec."""
        codec = self.codec(name)
        if codec is None:
            return self.unknown(builtin_codecs.unknown_value(name, value))
        try:
            return codec.decode(value)
        except RestoreError as error:
            return self.unknown(builtin_codecs.unknown_value(name, value, str(error)))

    def unknown(self, value: UnknownValue) -> object:
        """Raise RestoreError: the class or codec of a value is not there, or changed. A subclass may replace it."""
        raise RestoreError(
            f"restore: {self.header.what} holds a value of {value.name}: {value.reason}"
        )


def _unknown_wrapper(
    node: WrapperNode, inner: dict[str, torch.Tensor] | None, reason: str = ""
) -> UnknownValue:
    name = node.class_name
    reason = reason or builtin_codecs.not_found(name, "a tensor class")
    return UnknownValue(builtin_codecs.class_title(name), inner, reason, name)


def _empty_quantized(
    stored: StoredTensor, node: QuantizedNode, parameters: Any, *, device: torch.device
) -> torch.Tensor:
    if node.scheme == "torch.per_tensor_affine":
        scale, zero_point = parameters
        return torch._empty_affine_quantized(
            stored.shape, scale=scale, zero_point=zero_point, dtype=stored.dtype, device=device
        )
    scales, zero_points = parameters
    return torch._empty_per_channel_affine_quantized(
        stored.shape,
        scales=scales.clone(),
        zero_points=zero_points.clone(),
        axis=node.axis,
        dtype=stored.dtype,
        device=device,
    )


def _generator(state: torch.Tensor, device: torch.device) -> torch.Generator | torch.Tensor:
    """Return a generator in that state; only the state, where this machine has no such device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return state.clone()
    try:
        generator = torch.Generator(device)
        generator.set_state(state)
    except RuntimeError as error:
        raise ValueError(f"not the state of a generator on {device}: {error}") from error
    return generator
