"""Byte transport: bytes from one rank of a restore to another, over a gloo group of tierfall's own.

A group is made for each checkpoint that is tried, apart from the groups of the training. Sends and receives match by
tag. Every wait is bounded, and one that fails ends the group: the ranks that wait for this one fail at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from tierfall.core.types.errors import TierfallError


class LostError(TierfallError):
    """Bytes did not arrive, or were not received, for a reason that another rank knows, if it still exists."""


class SendInFlight(Protocol):
    """A send in progress; its bytes must not change before ``wait`` has returned."""

    def wait(self) -> None: ...


class ByteTransport(Protocol):
    """Threads share it. Bytes are flat uint8 tensors in host memory; a tag is used once between two ranks."""

    def send(self, rank: int, tag: int, bytes: torch.Tensor) -> SendInFlight:
        """Begin to send. Raises LostError, as ``wait`` does, where the rank is gone or does not receive in time."""
        ...

    def receive(self, rank: int, tag: int, target: torch.Tensor) -> None:
        """Fill ``target``. Raises LostError where the rank is gone, or does not send in time."""
        ...

    def cut(self) -> None:
        """Fail, by LostError, all sends and receives, here and, where they involve this rank, on the others. May be
        called twice."""
        ...


Connect = Callable[[str, int, int, float], ByteTransport]
"""Meets the other ranks under a name that was not used before: name, rank, world size, seconds to wait for any."""


class GlooTransport:
    """A transport over ``torch.distributed``'s gloo; ``store`` is one that all ranks share."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int, timeout_s: float) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        self._timeout = timedelta(seconds=timeout_s)
        self._rank = rank
        try:
            self._group: Any = ProcessGroupGloo(
                PrefixStore(name, store), rank, world_size, self._timeout
            )
        except RuntimeError as error:
            raise LostError(
                f"rank {rank} could not meet all others to exchange bytes with them: {_first_line(error)}"
            ) from error

    def send(self, rank: int, tag: int, bytes: torch.Tensor) -> SendInFlight:
        try:
            work = self._group.send([bytes], rank, tag)
        except RuntimeError as error:
            raise self._lost(rank, "takes nothing", error) from error
        return _GlooSend(self, rank, work, bytes)

    def receive(self, rank: int, tag: int, target: torch.Tensor) -> None:
        try:
            self._group.recv([target], rank, tag).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(rank, "sends nothing", error) from error

    def cut(self) -> None:
        # Gloo has no call for this: a wait that runs out of time closes every connection of its group.
        peer = 0 if self._rank else 1
        nothing = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _lost(self, rank: int, does: str, error: RuntimeError) -> LostError:
        return LostError(f"rank {rank} {does}: {_first_line(error)}")


class _GlooSend:
    def __init__(self, transport: GlooTransport, rank: int, work: Any, bytes: torch.Tensor) -> None:
        self._transport, self._rank, self._work, self._bytes = transport, rank, work, bytes

    def wait(self) -> None:
        try:
            self._work.wait(self._transport._timeout)
        except RuntimeError as error:
            raise self._transport._lost(self._rank, "does not take it", error) from error


_NEVER_SENT = (1 << 31) - 1


def _first_line(error: RuntimeError) -> str:
    """Return gloo's message without the place in its own sources."""
    line = str(error).splitlines()[0] if str(error) else repr(error)
    return line.partition("] ")[2][:200] if line.startswith("[") else line[:200]
