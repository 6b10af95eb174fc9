"""Python objects from an image: memory for what they hold, named before it is filled, and the objects after.

``prepare`` allocates, from sizes that the header's check held against the image's own; ``build`` runs once all bytes
are there. Equal slots on one device are one tensor, so what was tied comes back tied.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import (
    CodecNode,
    ConflictNode,
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
)
from tierfall.core.tensors import numpy_values, tensors, value_codec
from tierfall.core.tensors.value_codec import MAPPING_TYPES
from tierfall.core.types.errors import IntegrityError, RestoreError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTarget:
    """Memory for a block of a tensor: ``target``, flat, gets what begins at ``offset`` and is ``lengths`` long; without
    them all of it."""

    slot: int
    target: torch.Tensor
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One stored tensor to be read: ``start`` to ``end`` of the data go, whole, to each of the flat targets."""

    name: str
    start: int
    end: int
    targets: tuple[torch.Tensor, ...]


class Builder:
    """Allocates and builds what the nodes of one header describe, and knows every target of every slot."""

    def __init__(self, header: ImageHeader) -> None:
        self.header = header
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._blocks: list[BlockTarget] = []
        self._flat: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._typed: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._laid_out: dict[tuple[int, torch.device], torch.Tensor] = {}

    # ---- before the bytes

    def add_target(self, slot: int, flat: torch.Tensor) -> None:
        self._targets.setdefault(slot, []).append(flat)

    def add_block(
        self, slot: int, flat: torch.Tensor, offset: tuple[int, ...], lengths: tuple[int, ...]
    ) -> None:
        """Note memory for a block of a slot, of a header that is merged."""
        self._blocks.append(BlockTarget(slot=slot, target=flat, offset=offset, lengths=lengths))

    def targets(self) -> tuple[BlockTarget, ...]:
        """Return all memory that is to be filled, whole tensors and blocks."""
        wholes = (
            BlockTarget(slot=slot, target=flat)
            for slot, flats in self._targets.items()
            for flat in flats
        )
        return (*wholes, *self._blocks)

    def flat(self, slot: int, device: torch.device) -> torch.Tensor:
        """Return memory for a slot's bytes, flat, which will be filled."""
        found = self._flat.get((slot, device))
        if found is None:
            length = self.header.tensors[slot].length
            found = torch.empty(length, dtype=torch.uint8, device=device)
            self._flat[slot, device] = found
            self.add_target(slot, found)
        return found

    def tensor(self, slot: int, device: torch.device) -> torch.Tensor:
        """Return memory for a slot, of its dtype and shape."""
        found = self._typed.get((slot, device))
        if found is None:
            stored = self.header.tensors[slot]
            # Viewed, not allocated as such: some dtypes warn when they are.
            found = self.flat(slot, device).view(stored.dtype).view(stored.shape)
            self._typed[slot, device] = found
        return found

    def laid_out(self, slot: int, device: torch.device) -> torch.Tensor:
        """Return a slot's tensor with the strides that it was saved with, once its bytes are there."""
        strides = self.header.tensors[slot].strides
        if strides is None:
            return self.tensor(slot, device)
        found = self._laid_out.get((slot, device))
        if found is None:
            found = tensors.strided_copy(self.tensor(slot, device), strides)
            self._laid_out[slot, device] = found
        return found

    def prepare(self, node: Node, device: torch.device, named: str = "") -> None:
        """Allocate all that ``build(node, device)`` will need; RestoreError, which tells its name below ``named``, for
        what ranks had differently, and where a codec is not registered."""
        for name, leaf in leaves(node, named):
            match leaf:
                case TensorNode():
                    self.tensor(leaf.slot, device)
                case ValueNode():
                    self._prepare_value(leaf)
                case QuantizedNode():
                    self.flat(leaf.slot, device)
                case CodecNode():
                    self._codec(leaf.name)
                case ConflictNode():
                    raise RestoreError(f"{self.header.what}: {name}: {leaf.reason}")
                case PiecesNode():
                    raise RestoreError(f"{self.header.what}: {name}: its bytes lie in other images")
            for child in leaf.children():
                self.prepare(child, CPU if isinstance(leaf, RandomNode) else device, name)

    def _prepare_value(self, node: ValueNode) -> None:
        for slot in node.blobs:
            self.flat(slot, CPU)
        value_codec.decode(self.header.values[node.number], _NameCheck(self))

    def fills(self) -> tuple[Fill, ...]:
        """Return what is to be read, in image order; tensors without bytes are left out."""
        found = []
        for slot in sorted(self._targets):
            stored = self.header.tensors[slot]
            if stored.length:
                found.append(
                    Fill(
                        name=stored.name,
                        start=stored.start,
                        end=stored.end,
                        targets=tuple(self._targets[slot]),
                    )
                )
        return tuple(found)

    # ---- after the bytes

    def build(self, node: Node, device: torch.device) -> Any:
        """Return the object that a prepared node describes."""
        match node:
            case MapNode():
                result = MAPPING_TYPES[node.kind]()
                for key, child in node.entries:
                    result[key] = self.build(child, device)
                return result
            case SequenceNode():
                built = [self.build(child, device) for child in node.nodes]
                return tuple(built) if node.is_tuple else built
            case ModuleNode():
                return OrderedDict((k, self.build(child, device)) for k, _, child in node.entries)
            case OptimizerNode():
                return self._optimizer(node, device)
        return self._leaf(node, device)

    def _leaf(self, node: Node, device: torch.device) -> Any:
        match node:
            case TensorNode():
                return self.laid_out(node.slot, device)
            case ValueNode():
                return self.value(node)
            case ObjectNode():
                return self.build(node.state, device)
            case RandomNode():
                return self.build(node.state, CPU)
            case QuantizedNode():
                return self._quantized(node, device)
            case CodecNode():
                return self.registered(node.name, self.build(node.value, device))
        raise AssertionError(f"nothing is built of {node}")

    def _optimizer(self, node: OptimizerNode, device: torch.device) -> dict[str, Any]:
        groups = []
        for numbers, child in node.groups:
            groups.append({**self.build(child, device), "params": list(numbers)})
        state = {
            key if isinstance(key, int) else key[0]: self.build(child, device)
            for key, child in node.state
        }
        return {"state": state, "param_groups": groups}

    def _quantized(self, node: QuantizedNode, device: torch.device) -> torch.Tensor:
        parameters = self.build(node.parameters, device)
        try:
            tensor = _empty_quantized(
                self.header.tensors[node.slot], node, parameters, device=device
            )
        except (RuntimeError, TypeError) as error:
            raise IntegrityError(
                f"{self.header.what}: a quantized tensor's scale is damaged: {error}"
            ) from error
        flat = tensors.as_bytes(tensor)
        assert flat is not None, "a fresh tensor that is not contiguous"
        flat.copy_(self.flat(node.slot, device))
        return tensor

    # ---- values

    def value(self, node: ValueNode) -> Any:
        """Return a plain value; IntegrityError where the bytes of a blob are not one."""
        try:
            return value_codec.decode(self.header.values[node.number], _BlobReader(self, node))
        except ValueError as error:
            raise IntegrityError(f"{self.header.what}: a value is damaged: {error}") from error

    def _codec(self, name: str) -> value_codec.ValueCodec:
        found = value_codec.codec_named(name)
        if found is None:
            raise RestoreError(
                f"restore: {self.header.what} holds values of the registered type {name!r}; call "
                f"tierfall.register_codec for it first"
            )
        return found

    def registered(self, name: str, value: object) -> object:
        return self._codec(name).decode(value)


class _NameCheck:
    """Decodes without contents, for the names of registered types alone."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def blob(self, number: int, kind: str, members: dict[str, Any]) -> object:
        return None

    def registered(self, name: str, value: object) -> object:
        self._builder._codec(name)
        return None


class _BlobReader:
    def __init__(self, builder: Builder, node: ValueNode) -> None:
        self._builder = builder
        self._node = node

    def registered(self, name: str, value: object) -> object:
        return self._builder.registered(name, value)

    def blob(self, number: int, kind: str, members: dict[str, Any]) -> object:
        flat = self._builder.flat(self._node.blobs[number], CPU)
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
    """Return a generator in that state, or the state alone where this machine has no such device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return state.clone()
    try:
        generator = torch.Generator(device)
        generator.set_state(state)
    except RuntimeError as error:
        raise ValueError(f"not the state of a generator on {device}: {error}") from error
    return generator
