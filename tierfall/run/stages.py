"""What one rank is writing by path, until all ranks save it: the files of at most one step, and why others are gone.

It knows nothing of the other ranks, and decides nothing: ``by_path`` says when a step's files are begun, taken and
given up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tierfall.core.types.errors import CaptureError
from tierfall.run.staging import StagedFiles

_REMEMBERED = 16


class PathStages:
    """The stage of this rank, and the last steps that were given up. Thread-safe.

    ``limit_bytes`` is asked, once the stage before is freed, how much the next may take.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._stage: StagedFiles | None = None
        self._given_up: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)

    def begin(self, step: int) -> None:
        """Make room for the files of a step; those of a step before it are freed."""
        with self._lock:
            self._release("another save by path began before it was finished")
            tried = [known for known in self._given_up if known[0] == step]
            for known in tried:
                self._given_up.remove(known)
            self._stage = StagedFiles(step, limit_bytes=self._limit_bytes())

    def is_known(self, step: int) -> bool:
        """Say whether this step's files were begun, given up or not."""
        with self._lock:
            return self._is_staged(step) or self._was_given_up(step)

    def is_staged(self, step: int) -> bool:
        """Say whether this step is being written."""
        with self._lock:
            return self._is_staged(step)

    def of(self, step: int) -> StagedFiles:
        """Return the stage of a step. Raises CaptureError where it is gone, or was never begun."""
        with self._lock:
            if self._stage is None or self._stage.step != step:
                raise CaptureError(f"save of step {step} by path: {self._why_gone(step)}")
            return self._stage

    def check_kept(self, step: int) -> None:
        """Raise CaptureError where this rank's files of a step were freed, so that it cannot be saved."""
        with self._lock:
            if not self._is_staged(step) and self._was_given_up(step):
                raise CaptureError(f"save of step {step} by path: {self._why_gone(step)}")

    def take(self, step: int) -> StagedFiles | None:
        """Return the stage of a step, which is the caller's to free from now on; None where there is none."""
        with self._lock:
            if not self._is_staged(step):
                return None
            stage, self._stage = self._stage, None
            return stage

    def give_up(self, step: int, reason: str) -> None:
        """Free the files of a step, where there are any."""
        with self._lock:
            if self._is_staged(step):
                self._given_up.appendleft((step, reason))
                self._release(reason)

    def note_failed(self, step: int, reason: str) -> None:
        """Remember why a step was not saved."""
        with self._lock:
            self._given_up.appendleft((step, reason))

    def let_go(self, reason: str) -> None:
        """Free whatever is staged."""
        with self._lock:
            self._release(reason)

    # Under the lock ----------------------------------------------------------------------------------

    def _is_staged(self, step: int) -> bool:
        return self._stage is not None and self._stage.step == step

    def _was_given_up(self, step: int) -> bool:
        return any(of == step for of, _ in self._given_up)

    def _why_gone(self, step: int) -> str:
        why = next((reason for of, reason in self._given_up if of == step), "it was not begun here")
        return f"its files are gone: {why}"

    def _release(self, reason: str) -> None:
        if self._stage is not None:
            if self._stage.names():
                self._given_up.appendleft((self._stage.step, reason))
            self._stage.free()
            self._stage = None
