"""Preparation of an arena's memory in the background: its pages are touched, and locked for copies from a device.

Images are filled and read without it, only slower: a first touch costs ten times the copy, and a copy from a device to
memory that is not locked keeps the host waiting. What the next images need comes first. The thread rests as long as it
has worked, since other threads wait for a page table, or for the driver, meanwhile.
"""

from __future__ import annotations

import logging
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
"""The rest while the only pieces that are left hold an image that is being filled."""
JOIN_S = 5.0


class Preparation:
    """The thread that prepares one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.device: torch.device | None = None
        self._more = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, device: torch.device | None) -> None:
        """Prepare what is not prepared. Pages are locked once a ``device`` is known that copies come from. May be
        called again."""
        self.device = device or self.device
        self._more.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"tierfall-{self._arena.run}-prepare", daemon=True
            )
            self._thread.start()

    def resume(self) -> None:
        """Prepare what has become unprepared, if the preparation has begun."""
        self._more.set()

    def close(self) -> None:
        """End the thread. The pages stay as they are."""
        self._stop.set()
        self._more.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._more.wait()
            self._more.clear()
            try:
                while not self._stop.is_set() and self._prepare_next():
                    continue
            except Exception:
                logger.warning(
                    "arena %s: its memory is not prepared any further; saves go on, slower",
                    self._arena.path,
                    exc_info=True,
                )
                return

    def _prepare_next(self) -> bool:
        """Prepare one piece; False if none is left."""
        piece = self._arena.unprepared_piece(self.device)
        if piece is None:
            return False
        start = piece * PIECE_BYTES
        for at in range(start, start + PIECE_BYTES, TOUCH_BYTES):
            began_s = time.monotonic()
            if not self._arena.touch(ByteRange(start=at, end=at + TOUCH_BYTES)):
                break
            self._rest(time.monotonic() - began_s)
        began_s = time.monotonic()
        done = self._arena.set_prepared(piece, self.device)
        self._rest(time.monotonic() - began_s if done else BUSY_S)
        return True

    def _rest(self, worked_s: float) -> None:
        self._stop.wait(max(REST_S, worked_s))
