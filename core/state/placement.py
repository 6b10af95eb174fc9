"""How a walk takes tensors in: a plain one, this rank's part of one that several ranks hold, blocks, a quantized one.

What an image cannot take is refused, with its path. It knows nothing of containers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tierfall.core.state.tensor_table import TensorTable
from tierfall.core.state.unsupported import refusal, refuse
from tierfall.core.state.view import DECLARED, NO_OWNER, Node
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.tensors import tensors, value_codec
from tierfall.core.tensors.dtensor import (
    LocalBlocks,
    NotOneBlockError,
    TensorPiece,
    is_sharded,
    local_part,
)
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.values import Changes


class TensorIntake:
    """Takes tensors into its ``table``, and a quantized one's scale into the walk's ``values``.

    The walk says where it is: what the innermost ``item()`` says (``ruled``), and, inside an optimizer, of which
    parameter the state is (``owner``: its id; NO_OWNER elsewhere).
    """

    def __init__(self, values: list[Coded], recall: WalkCache) -> None:
        self.table = TensorTable(recall)
        self.ruled: Changes | None = None
        self.owner = NO_OWNER
        self._values = values

    def local_parts(
        self, met: list[Any], about: tuple[Any, ...], trail: Trail
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Replace tensors of several ranks by this rank's parts, for a look at them; where those lie is another thing
        that has to be as it was."""
        parts = [self._local_part(t, trail) if is_sharded(t) else (t, None) for t in met]
        return [local for local, _ in parts], (*about, [piece for _, piece in parts])

    def _local_part(self, tensor: torch.Tensor, trail: Trail) -> tuple[torch.Tensor, TensorPiece]:
        try:
            return local_part(tensor)
        except NotOneBlockError as error:
            refuse(trail, f"cannot be saved: {error}")

    def tensor(
        self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int = NO_OWNER
    ) -> Node:
        """Take a tensor in. ``owner`` is the id of the parameter whose memory it is."""
        if is_sharded(tensor):
            if isinstance(tensor, nn.Parameter):
                owner = id(tensor)
            local, piece = self._local_part(tensor, trail)
            reason = tensors.refusal(local)
            if reason is not None:
                refuse(trail, f"cannot be saved: {reason}")
            shape = tuple(local.shape)
            return self.add(local, local.dtype, shape, name, trail, owner=owner, piece=piece)
        reason = tensors.refusal(tensor)
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        if type(tensor) is nn.Parameter:
            owner = id(tensor)
        if tensor.is_quantized:
            return self._quantized(tensor, name, trail, owner=owner)
        if tensor.requires_grad:
            tensor = tensor.detach()
        return self.add(tensor, tensor.dtype, tensor.shape, name, trail, owner=owner)

    def blocks(self, blocks: LocalBlocks, name: str, trail: Trail) -> Node:
        """Take in what this rank holds of a tensor that was cut elsewhere."""
        parts = blocks.parts
        if len(parts) == 1 and parts[0][1] is None:
            return self.tensor(parts[0][0], name, trail)
        numbers = [
            self._block(tensor, piece, f"{name}%p{number}" if number else name, trail)
            for number, (tensor, piece) in enumerate(parts)
        ]
        return numbers[0] if len(numbers) == 1 else ("p", tuple(numbers))

    def _block(
        self, tensor: torch.Tensor, piece: TensorPiece | None, name: str, trail: Trail
    ) -> int:
        """Take a block in, and never as an alias: other ranks may have this block of one of two tied tensors alone."""
        reason = tensors.refusal(tensor)
        if reason is None and tensor.is_quantized:
            reason = "a quantized tensor in blocks"
        if reason is None and (piece is None or piece.lengths != tuple(tensor.shape)):
            reason = f"a block of shape {tuple(tensor.shape)} with the place {piece}"
        if reason is not None:
            refuse(trail, f"cannot be saved: {reason}")
        changes, owner = self.rule(NO_OWNER)
        tensor = tensor.detach()
        kind = (tensor.dtype, tensor.shape)
        return self.table.add(tensor, *kind, name, changes, trail, piece, owner=owner, alone=True)

    def _quantized(self, tensor: torch.Tensor, name: str, trail: Trail, *, owner: int) -> Node:
        try:
            scheme = str(tensor.qscheme())
        except RuntimeError as error:
            raise refusal(trail, f"cannot be saved: {tensors.UNSCALED}") from error
        flat = tensors.as_bytes(tensor.detach().contiguous())
        assert flat is not None, "a contiguous tensor without bytes"
        number = self.add(flat, tensor.dtype, tensor.shape, name, trail, owner=owner)
        if tensor.qscheme() == torch.per_tensor_affine:
            self._values.append([value_codec.encode_atom(tensor.q_scale()), tensor.q_zero_point()])
            return ("q", number, scheme, 0, ("v", len(self._values) - 1))
        parts = (
            self.tensor(tensor.q_per_channel_scales().clone(), f"{name}%scales", trail),
            self.tensor(tensor.q_per_channel_zero_points().clone(), f"{name}%zero_points", trail),
        )
        return ("q", number, scheme, tensor.q_per_channel_axis(), ("l", parts))

    def rule(self, owner: int) -> tuple[Changes, int]:
        """Say when a tensor may change, and whose step changes it; what the user said counts most."""
        if self.ruled is not None:
            return self.ruled, DECLARED if self.ruled is Changes.ON_STEP else NO_OWNER
        owner = self.owner if owner == NO_OWNER else owner
        return (Changes.ANYTIME if owner == NO_OWNER else Changes.ON_STEP), owner

    def add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        trail: Trail,
        *,
        owner: int = NO_OWNER,
        piece: TensorPiece | None = None,
    ) -> int:
        """Put a tensor, of whose kind the caller is sure, into the table, and return its number."""
        changes, owner = self.rule(owner)
        return self.table.add(tensor, dtype, shape, name, changes, trail, piece, owner=owner)
