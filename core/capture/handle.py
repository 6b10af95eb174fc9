"""The handle that a save returns: the outcome of one save on each tier.

Capture thread and coordinator set outcomes. The training loop queries them; a wait raises a copy of the error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tierfall.core.runtime.callbacks import CallbackThread, check_callback
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import CaptureError, ConfigError, FlushError, TierfallError
from tierfall.core.types.units import as_seconds, format_duration, format_size
from tierfall.core.types.values import CheckpointId, SaveOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """Times of one save in seconds since the call of ``save``; None or missing is what has not happened yet.

    ``bytes`` is the size of this rank's image. ``lazy_bytes`` of them were left to the lazy capture, the rest was
    copied before ``save`` returned. ``blocked_s`` is the time for which the training thread was blocked: in ``save``,
    and at the barrier.
    """

    bytes: int
    lazy: bool
    blocked_s: float
    captured_s: float | None = None
    durable_s: Mapping[str, float] = field(default_factory=dict)
    lazy_bytes: int = 0

    def __repr__(self) -> str:
        how = "captured lazily" if self.lazy else "captured"
        parts = [
            format_size(self.bytes),
            f"training blocked {format_duration(self.blocked_s)}",
            "not captured yet"
            if self.captured_s is None
            else f"{how} after {format_duration(self.captured_s)}",
            *(f"on {t} after {format_duration(s)}" for t, s in self.durable_s.items()),
        ]
        return f"<SaveStats: {'; '.join(parts)}>"


class SaveHandle:
    """The outcome of one save. Thread-safe; keeps no tensor alive."""

    def __init__(
        self,
        checkpoint: CheckpointId,
        tiers: tuple[str, ...],
        *,
        in_memory: str,
        before_wait: Callable[[float | None], None] | None = None,
        callbacks: CallbackThread | None = None,
        clock: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
    ) -> None:
        """``before_wait`` is called with the timeout, in seconds, before a wait begins: it helps the capture to end.
        ``callbacks`` is the thread of the functions of ``add_done_callback`` (None: one of this handle). ``began_s`` is
        when ``save`` was called, by ``clock`` (None: now)."""
        self._checkpoint = checkpoint
        self._tiers = tiers
        self._in_memory = in_memory
        self._clock = clock
        self.began_s = clock() if began_s is None else began_s
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may ask while its thread is in here
        self._waiting: list[InterruptibleEvent] = []
        self._captured = False
        self._failure: BaseException | None = None
        self._outcome = SaveOutcome.PENDING
        self._done: set[str] = set()
        self._failed: dict[str, BaseException] = {}
        self._stats = SaveStats(bytes=0, lazy=False, blocked_s=0.0)
        self._waited_s = 0.0
        self._captured_s: float | None = None
        self._durable_s: dict[str, float] = {}
        self._before_wait = before_wait
        self._callbacks = callbacks or CallbackThread("tierfall-callbacks")
        self._on_done: list[tuple[str, Callable[[SaveHandle], object]]] = []

    # For the training loop -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._checkpoint.step

    @property
    def attempt(self) -> int:
        return self._checkpoint.attempt

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that this step is flushed to, fastest first."""
        return self._tiers

    @property
    @public_call
    def outcome(self) -> SaveOutcome:
        """``pending`` until the last tier of this step has it (``saved``), or the save was given up."""
        with self._lock:
            return self._outcome

    @property
    @public_call
    def stats(self) -> SaveStats:
        with self._lock:
            return replace(
                self._stats,
                blocked_s=self._stats.blocked_s + self._waited_s,
                captured_s=self._captured_s,
                durable_s=dict(self._durable_s),
            )

    @public_call
    def exception(self) -> BaseException | None:
        """Why this save was given up, or why a tier did not get it; None if there was no error."""
        with self._lock:
            return self._failure or next(iter(self._failed.values()), None)

    @public_call
    def captured(self, timeout: float | None = None) -> None:
        """Wait until the image is sealed in host memory. Raises the error that prevented it, or TimeoutError after
        ``timeout`` seconds."""
        self._wait(lambda: self._captured or self._failure is not None, timeout, "captured")
        with self._lock:
            if self._failure is not None and not self._captured:
                raise _copy_of(self._failure)

    @public_call
    def wait(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Wait until the step is committed on ``tier`` (default: the last one that it is flushed to).

        Raises the error that prevented it, ConfigError for a tier that this step is not flushed to, or TimeoutError
        after ``timeout`` seconds.
        """
        name = self._resolve(tier)
        self._wait(lambda: self._is_over(name), timeout, f"committed on {name}")
        with self._lock:
            if name in self._done:
                return
            raise _copy_of(self._failed.get(name) or self._failure)

    @public_call
    def done(self, tier: str | None = None) -> bool:
        """Whether the step is committed on ``tier`` (default: the last one that it is flushed to)."""
        name = self._resolve(tier)
        with self._lock:
            return name in self._done

    @public_call
    def add_done_callback(
        self, fn: Callable[[SaveHandle], object], tier: str | None = None
    ) -> None:
        """Call ``fn(handle)`` once, when ``wait(tier)`` would return or raise: the step is committed on ``tier``
        (default: the last one that it is flushed to), or that has failed. ``done`` and ``exception`` tell which.

        If that is so already, it is called at once. In any case the thread ``tierfall-<run>-callbacks`` calls it, which
        holds no lock: a slow ``fn`` delays other callbacks of the run, and nothing else. An exception that it raises is
        logged. ``close`` waits a second at most for callbacks; later ones are called while the process lives.

        Raises ConfigError for a tier that this step is not flushed to, and in a forked child.
        """
        check_callback(fn, "(handle)", call="add_done_callback")
        name = self._resolve(tier)
        self._check_process("call back")
        self._callbacks.start()
        with self._lock:
            self._on_done.append((name, fn))
            self._notify()

    def __repr__(self) -> str:
        with self._lock:
            done, failed = sorted(self._done), dict(self._failed)
            outcome, captured, failure = self._outcome, self._captured, self._failure
        parts = [f"step {self.step} (attempt {self.attempt}): {outcome}"]
        parts += ["captured"] if captured else []
        parts += [f"on {', '.join(done)}"] if done else []
        parts += [f"not on {tier}: {error}" for tier, error in failed.items()]
        parts += [str(failure)] if failure is not None else []
        return f"<SaveHandle of {', '.join(parts)}>"

    def __dir__(self) -> list[str]:
        """The names for a training loop, without those for capture and coordinator."""
        return [name for name in super().__dir__() if not name.startswith(("on_", "add_blocked"))]

    # For capture and coordinator -------------------------------------------------------------------

    def on_begun(self, *, bytes: int, lazy: bool, blocked_s: float, lazy_bytes: int = 0) -> None:
        with self._lock:
            self._stats = SaveStats(
                bytes=bytes, lazy=lazy, blocked_s=blocked_s, lazy_bytes=lazy_bytes
            )

    def add_blocked(self, seconds: float) -> None:
        """Add time for which the training thread waited for this capture outside of ``save``."""
        with self._lock:
            self._waited_s += seconds

    def on_captured(self) -> None:
        with self._lock:
            self._captured = True
            self._captured_s = self._clock() - self.began_s
            self._done.add(self._in_memory)
            if not self._tiers:
                self._outcome = SaveOutcome.SAVED
            self._notify()

    def on_given_up(self, outcome: SaveOutcome, error: BaseException) -> None:
        """The image will never be complete (skipped, failed), or was removed from memory (superseded).

        A save whose outcome is ``saved`` keeps it: only tiers that have not received it fail.
        """
        with self._lock:
            if self._outcome is SaveOutcome.SAVED:
                self._failed.update((t, error) for t in self._tiers if t not in self._done)
                self._notify()
                return
            self._outcome = outcome
            self._failure = error
            if outcome is SaveOutcome.SUPERSEDED:
                self._captured = False
                self._done.discard(self._in_memory)
                self._failed.clear()
            self._notify()

    def on_committed(self, tier: str) -> None:
        with self._lock:
            self._done.add(tier)
            self._failed.pop(tier, None)
            self._durable_s[tier] = self._clock() - self.began_s
            if self._tiers and tier == self._tiers[-1]:
                self._outcome = SaveOutcome.SAVED
            self._notify()

    def on_tier_failed(self, tier: str, error: BaseException) -> None:
        with self._lock:
            self._failed[tier] = error
            if self._tiers and tier == self._tiers[-1]:
                self._outcome = SaveOutcome.FAILED
            self._notify()

    def is_settled(self) -> bool:
        """Whether nothing of this save is pending: each tier has it, or will not get it."""
        with self._lock:
            if self._failure is not None:
                return True
            return self._captured and all(t in self._done or t in self._failed for t in self._tiers)

    def on_stopped(self, error: BaseException) -> None:
        """Nothing will continue what is still pending; earlier failures remain the reported reason."""
        with self._lock:
            for tier in self._tiers:
                if tier not in self._done and tier not in self._failed:
                    self._failed[tier] = error
            if self._outcome is SaveOutcome.PENDING:
                self._outcome = SaveOutcome.FAILED
                if not self._captured:
                    self._failure = error
            self._notify()

    def _notify(self) -> None:
        """Wake all waiting threads, and have what is over called back; the caller holds the lock."""
        while self._waiting:
            self._waiting.pop().set()
        waiting, self._on_done = self._on_done, []
        for name, fn in waiting:
            if self._is_over(name):
                self._callbacks.put(fn, self)
            else:
                self._on_done.append((name, fn))

    def _is_over(self, tier: str) -> bool:
        """Whether the tier has the step, or will not get it now; the caller holds the lock."""
        return tier in self._done or self._failure is not None or tier in self._failed

    def _resolve(self, tier: object) -> str:
        if isinstance(tier, int | float):
            raise ConfigError(f"{tier} is not a tier; a time is given as wait(timeout={tier})")
        name = str(tier or (self._tiers[-1] if self._tiers else self._in_memory))
        if name != self._in_memory and name not in self._tiers:
            raise ConfigError(
                f"step {self.step} goes to no tier {name!r}; expected one of "
                f"{', '.join((self._in_memory, *self._tiers))}"
            )
        return name

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"step {self.step} was saved by process {self._pid}; a forked child cannot {doing} for it: {doing} in "
                "that process; tierfall.load() reads it here once it is committed"
            )

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._check_process("wait")
        timeout = as_seconds(timeout, what="timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        # under capture.verify the image waits for its barrier: this is one
        if self._before_wait is not None:
            self._before_wait(timeout)
        while True:
            event = InterruptibleEvent()
            with self._lock:
                if ready():
                    return
                self._waiting.append(event)
            if not event.wait(None if deadline is None else deadline - time.monotonic()):
                with self._lock:
                    self._waiting = [other for other in self._waiting if other is not event]
                    if ready():
                        return
                raise TimeoutError(
                    f"step {self.step} is not {what} after {timeout:g} s; it continues in the background: wait again, "
                    "or for longer"
                )


def _copy_of(error: BaseException | None) -> BaseException:
    """A new exception of the same class, caused by the original, whose traceback would grow with each raise."""
    if error is None:
        return FlushError("the save was given up")
    kind = type(error) if isinstance(error, TierfallError) else CaptureError
    copy = kind(str(error))
    copy.__dict__.update(error.__dict__)  # such as ``tensors`` of a StateChangedError
    copy.__cause__ = error
    return copy
