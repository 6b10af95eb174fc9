"""Signals: who listens to which, from the first listener of a signal until its last one stops.

A listener has a ``flag`` or a ``work``. A flag is called on the main thread, between two of its bytecodes, as any
handler of Python is. A work runs on a thread of its own as soon as the signal arrives, whatever the main thread is in
the middle of, a step on the GPU too: the interpreter writes each signal's number to a socket at once (its wakeup fd),
which a thread here reads. Once all works have ended, the signal has its previous effect: the handler that was there
before runs on the main thread, or the process ends as the signal would have ended it.

A forked child has none of this. Nothing here knows what is listened for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from signal import Signals
from types import FrameType
from typing import Any

from tierfall.core.types.errors import ConfigError

logger = logging.getLogger("tierfall")
Told = Callable[[Signals], None]


@dataclass(eq=False, slots=True, kw_only=True)
class Listener:
    """See the module. A flag is called again for each arrival, a work only for the first."""

    signals: frozenset[Signals]
    flag: Told | None = None
    work: Told | None = None
    begun: bool = False
    ended: bool = False


def listen(
    signals: Collection[Signals], *, what: str, flag: Told | None = None, work: Told | None = None
) -> Listener:
    """Listen to signals until ``stop``. While a flag listens, and no work, a signal that would end the process does
    not; a handler that was there before is called after the flag.

    ``flag`` must only set a flag; ``work`` may take its time, and what it raises is logged. Raises ConfigError, which
    names ``what`` asks for it, off the main thread: Python lets no other thread install a handler.
    """
    check_thread(what)
    listener = Listener(signals=frozenset(signals), flag=flag, work=work)
    _hub.add(listener)
    return listener


def check_thread(what: str) -> None:
    """Raise ConfigError, which names ``what`` asks for signals, where this thread cannot listen to any."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"{what}: only the main thread can listen to signals, and this is thread "
            f"{threading.current_thread().name}; call tierfall.open on the main thread, or leave the signals out"
        )


def stop(listener: Listener) -> None:
    """Listen no more; may be called twice. A work that has begun goes on, and the signal's previous effect follows it.

    The last listener puts the previous handler back, unless somebody has put another one in its place meanwhile.
    """
    _hub.remove(listener)


class SignalWatch:
    """Calls ``asked`` with a signal's name, on the main thread, for as long as it is open: a flag, as ``listen`` has
    it. Without names it watches nothing."""

    def __init__(self, names: Collection[str], asked: Callable[[str], None]) -> None:
        self._listener: Listener | None = None
        if names:
            self._listener = listen(
                [Signals[name] for name in names],
                what="open: interval.on_signal",
                flag=lambda number: asked(number.name),
            )

    def close(self) -> None:
        """Watch no more; may be called twice."""
        if self._listener is not None:
            stop(self._listener)


class _SignalHub:
    """All listeners of this process, and what was there before them.

    The handler runs on the main thread some time after the signal has arrived, perhaps after the works have ended:
    whichever comes last sees to the previous effect. ``_seen`` are signals whose handler ran first; who takes one out
    of it has it to do. Nothing here holds a lock: the handler may interrupt anything.

    ``_previous`` has, per signal, the handlers that were found at each time, the latest last: one that came in between
    and calls ours finds the one before it.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._previous: dict[Signals, list[Any]] = {}
        self._calling: Counter[Signals] = Counter()
        self._due: set[Signals] = set()
        self._seen: set[Signals] = set()
        self._passing: set[Signals] = set()
        self._ears: socket.socket | None = None
        self._mouth: socket.socket | None = None
        self._other_fd = -1
        self._forking = threading.local()

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)
        if self._ears is None:
            self._open()
        for number in listener.signals:
            if signal.getsignal(number) != self._handle:
                self._passing.discard(number)
                self._seen.discard(number)
                found = signal.signal(number, self._handle)
                self._previous.setdefault(number, []).append(found)

    def remove(self, listener: Listener) -> None:
        if listener not in self._listeners:
            return
        self._listeners.remove(listener)
        if threading.current_thread() is not threading.main_thread():
            return  # the handler stays, and does what the previous one would
        for number in listener.signals - {n for one in self._listeners for n in one.signals}:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before(number))
                del self._previous[number][-1]
        if not self._listeners:
            self._close()

    # Hearing ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._other_fd = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(self._ears,), name="tierfall-signals", daemon=True
        ).start()

    def _close(self) -> None:
        assert self._mouth is not None
        now = signal.set_wakeup_fd(-1)
        wanted = self._other_fd if now == self._mouth.fileno() else now  # somebody took the place
        try:
            signal.set_wakeup_fd(wanted)
        except (OSError, ValueError) as error:
            logger.debug("the wakeup fd %d that was there before is closed: %s", wanted, error)
        self._mouth.close()  # which ends the thread
        self._ears = self._mouth = None

    def _listen(self, ears: socket.socket) -> None:
        with ears:
            while heard := ears.recv(64):
                if self._other_fd >= 0:
                    _pass_bytes(self._other_fd, heard)
                for number in set(heard) & set(self._previous):
                    self._begin(Signals(number))

    def _begin(self, number: Signals) -> None:
        works = [x for x in self._listeners if x.work and number in x.signals]
        if not works:
            return
        if all(x.ended for x in works):
            if self._effect(number) is signal.SIG_DFL:
                _take_default_action(number)
            return
        self._due.add(number)
        fresh = [x for x in works if not x.begun]
        for listener in fresh:
            listener.begun = True
        if fresh:
            threading.Thread(
                target=self._work, args=(number, fresh), name="tierfall-signalled", daemon=True
            ).start()

    def _work(self, number: Signals, works: list[Listener]) -> None:
        threads = [
            threading.Thread(target=_run, args=(listener, number), daemon=True)
            for listener in works
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while self._due:
            self._pass_on(self._due.pop())

    # The previous effect ---------------------------------------------------------------------------

    def _pass_on(self, number: Signals) -> None:
        """Let a signal have its previous effect now that the works have ended."""
        effect = self._effect(number)
        if effect is signal.SIG_DFL:
            _take_default_action(number)
        elif effect is signal.SIG_IGN:
            self._seen.discard(number)
        elif _taken_from(self._seen, number):
            if signal.getsignal(number) == self._handle:
                self._passing.add(number)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)

    def _effect(self, number: Signals) -> Any:
        """What a signal is to do after the works; the main thread may just put the previous handler back."""
        before = self._before(number)
        now = signal.getsignal(number)
        return before if now == self._handle else now

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, on the main thread."""
        signaled = Signals(number)
        if self._calling[signaled] or _taken_from(self._passing, signaled):
            self._call_previous(signaled, frame)
            return
        listeners = [x for x in self._listeners if signaled in x.signals]
        for listener in listeners:
            if listener.flag is not None:
                listener.flag(signaled)
        if any(x.work for x in listeners):
            self._seen.add(signaled)
            if not all(x.ended for x in listeners if x.work):
                if self._mouth is not None:  # somebody may have taken the place of our wakeup fd
                    _pass_bytes(self._mouth.fileno(), bytes([number]))
                return
            if not _taken_from(self._seen, signaled):
                return
        elif listeners and self._before(signaled) is signal.SIG_DFL:
            return  # flags alone
        self._call_previous(signaled, frame)

    def _call_previous(self, number: Signals, frame: FrameType | None) -> None:
        previous = self._before(number)
        if previous is signal.SIG_DFL:
            _take_default_action(number)
        elif callable(previous):
            self._calling[number] += 1
            try:
                previous(number, frame)
            finally:
                self._calling[number] -= 1

    def _before(self, number: Signals) -> Any:
        """What was there before the latest handler, or before the one that is just called. A handler that a library in
        C installed is not Python's to call, nor to put back."""
        found = self._previous.get(number, ())
        place = len(found) - 1 - self._calling[number]
        previous = found[place] if place >= 0 else signal.SIG_DFL
        return signal.SIG_DFL if previous is None else previous

    # Forks -----------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """A signal that a child gets before it has forgotten all this would be heard here."""
        self._forking.mask = None
        if self._ears is not None:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._previous)

    def after_in_parent(self) -> None:
        if self._forking.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_in_child(self) -> None:
        if self._forking.mask is None:
            return
        signal.set_wakeup_fd(-1)
        for number in self._previous:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before(number))
        for end in (self._ears, self._mouth):
            if end is not None:
                end.close()
        self._listeners, self._ears, self._mouth = [], None, None
        self.after_in_parent()


def _taken_from(signals: set[Signals], number: Signals) -> bool:
    """Take it out of the set; False where somebody else has."""
    try:
        signals.remove(number)
    except KeyError:
        return False
    return True


def _run(listener: Listener, number: Signals) -> None:
    assert listener.work is not None
    try:
        listener.work(number)
    except BaseException:  # there is nobody else to tell, and the signal is to have its effect
        logger.exception("what was to be done on %s failed", number.name)
    finally:
        listener.ended = True


def _take_default_action(number: Signals) -> None:
    """Do to this process what the signal does by itself, from any thread: the main one may not come back from C."""
    ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(None))  # SIG_DFL
    os.kill(os.getpid(), number)


def _pass_bytes(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError as error:  # full: it will be read anyway; or closed by its owner
        logger.debug("a signal was not passed on to fd %d: %s", fd, error)


_hub = _SignalHub()
os.register_at_fork(
    before=_hub.before_fork,
    after_in_parent=_hub.after_in_parent,
    after_in_child=_hub.after_in_child,
)
