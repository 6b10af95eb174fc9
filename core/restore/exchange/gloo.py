"""The wire: bytes from one rank of a restore to another, over a gloo group of tierfall's own.

A group lives for one checkpoint that is tried, beside those of the training, which nothing here can disturb. What is
sent is taken in the order in which it was asked for by tag; every wait is bounded, and one that fails ends the group:
the ranks that it leaves waiting hear of that at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from tierfall.core.types.errors import TierfallError

logger = logging.getLogger("tierfall")


class LostError(TierfallError):
    """Bytes did not come, or were not taken: for a reason that another rank knows, if it is still there."""


class SendInFlight(Protocol):
    """Bytes on their way; they must not change before ``wait`` has returned."""

    def wait(self) -> None: ...


class ByteTransport(Protocol):
    """Threads share it. Bytes are flat uint8 tensors in host memory; a tag is used once between two ranks."""

    def send(self, rank: int, tag: int, bytes: torch.Tensor) -> SendInFlight:
        """Begin to send. Raises LostError, as ``wait`` does, where the rank is gone or does not take it in time."""
        ...

    def receive(self, rank: int, tag: int, target: torch.Tensor) -> None:
        """Fill ``target``. Raises LostError where the rank is gone, or does not send in time."""
        ...

    def cut(self) -> None:
        """End, by LostError, all that is under way and all that is still asked for, here and, for what involves this
        rank, on the others. May be called twice."""
        ...


Connect = Callable[[str, int, int, float], ByteTransport]
"""Meet the other ranks under a name that nobody has used before: name, rank, world size, seconds to wait for any."""


class GlooTransport:
    """A wire of ``torch.distributed``'s gloo; ``store`` is one that all ranks share already."""

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
    def __init__(self, wire: GlooTransport, rank: int, work: Any, bytes: torch.Tensor) -> None:
        self._wire, self._rank, self._work, self._bytes = wire, rank, work, bytes

    def wait(self) -> None:
        try:
            self._work.wait(self._wire._timeout)
        except RuntimeError as error:
            raise self._wire._lost(self._rank, "does not take it", error) from error


_NEVER_SENT = (1 << 31) - 1


def _first_line(error: RuntimeError) -> str:
    """What gloo says, without the place in its own sources."""
    line = str(error).splitlines()[0] if str(error) else repr(error)
    return line.partition("] ")[2][:200] if line.startswith("[") else line[:200]
