"""Preparation of an arena's memory in the background: its pages are touched, and locked for copies from a device.

Images are filled and read without it, only slower: a first touch costs ten times the copy, and a copy from a device to
memory that is not locked keeps the host waiting. What the next images need comes first. The thread rests as long as it
has worked, since other threads wait for a page table, or for the driver, meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from tierfall.core.types.values import ByteRange
from tierfall.tiers.arena.file import PIECE_BYTES

if TYPE_CHECKING:
    import torch

    from tierfall.tiers.arena.arena import Arena

logger = logging.getLogger("tierfall")

TOUCH_BYTES = 8 << 20
REST_S = 0.001
"""The shortest rest."""
BUSY_S = 0.05
"""The rest if pieces are left because images in them are being filled."""
JOIN_S = 5.0


class Preparation:
    """The thread that prepares one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.device: torch.device | None = None
        # Not an event: an interrupt of the thread that saves could leave its lock taken.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, device: torch.device | None) -> None:
        """Prepare what is not prepared. Pages are locked once a ``device`` is known that copies come from. May be
        called again, at no cost."""
        device = device or self.device
        if self._thread is not None and device == self.device:
            return
        self.device = device
        if self._thread is None:
            name = f"tierfall-{self._arena.run}-prepare"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the limit of processes, or of memory, is reached
                self._give_up(error)
        self.resume()

    def resume(self) -> None:
        """Prepare what has become unprepared, if the preparation has begun."""
        self._wakes.put(None)

    def close(self) -> None:
        """End the thread. The pages stay as they are."""
        self._closed = True
        self._wakes.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wakes.get()
                self._prepare_all()
        except Exception as error:  # noqa: BLE001 - reported
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "arena %s: its memory is not prepared any further: %s; saves go on, slower",
            self._arena.path,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )

    def _prepare_all(self) -> None:
        while pieces := self._arena.unprepared_pieces(self.device):
            for piece in pieces:
                self._prepare(piece)
                if self._closed:
                    return
            self._rest(BUSY_S)

    def _prepare(self, piece: int) -> None:
        """Touch a piece, and lock it unless an image in it is being filled."""
        start = piece * PIECE_BYTES
        for at in range(start, start + PIECE_BYTES, TOUCH_BYTES):
            began_s = time.monotonic()
            if self._closed or not self._arena.touch(ByteRange(start=at, end=at + TOUCH_BYTES)):
                break
            self._rest(time.monotonic() - began_s)
        began_s = time.monotonic()
        self._arena.set_prepared(piece, self.device)
        self._rest(time.monotonic() - began_s)

    def _rest(self, worked_s: float) -> None:
        """Rest as long as the thread has worked. A wake ends the rest; the plan is made again before the thread waits
        for the next."""
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=max(REST_S, worked_s))
