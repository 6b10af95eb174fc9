"""Signals: one handler for all listeners of a signal, from its first listener until its last one stops.

A listener has a ``flag`` or a ``work`` function. A flag is called on the main thread, between two of its bytecodes,
like any Python signal handler. A work function runs on a thread of its own as soon as the signal arrives, even while
the main thread waits for the GPU: the interpreter writes each signal's number to a socket (its wakeup fd), which a
thread here reads. Once all work functions have ended, the signal has its previous effect: the previous handler runs on
the main thread, or the process ends as the signal would have ended it. The kernel ends no process 1, as in a container,
by a default action: that process exits with 128 and the signal's number, as a shell would report it.

A forked child inherits none of this. Nothing here knows what the signals mean.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from signal import Signals
from types import FrameType
from typing import Any

from tierfall.core.runtime.messages import wait_for_messages
from tierfall.core.types.errors import ConfigError

logger = logging.getLogger("tierfall")
OnSignal = Callable[[Signals], object]
_HARMLESS = frozenset(
    (
        *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    )
)
"""Signals whose default action does not end a process."""


@dataclass(eq=False, slots=True, kw_only=True)
class Listener:
    """See the module. A flag is called for each arrival, a work function only for the first."""

    signals: frozenset[Signals]
    flag: OnSignal | None = None
    work: OnSignal | None = None
    begun: bool = False
    ended: bool = False


def add_listener(
    signals: Collection[Signals],
    *,
    what: str,
    flag: OnSignal | None = None,
    work: OnSignal | None = None,
) -> Listener:
    """Listen to ``signals``, if there are any, until ``stop``. With a flag and no work function, a signal that would
    end the process does not; a previous handler is called after the flag.

    ``flag`` must return at once. ``work`` may run for long, and its exceptions are logged. Raises ConfigError, which
    names the setting ``what``, on another than the main thread: Python installs handlers on that one only.
    """
    listener = Listener(signals=frozenset(signals), flag=flag, work=work)
    if signals:
        check_thread(what)
        _hub.add(listener)
    return listener


def check_thread(what: str) -> None:
    """Raise ConfigError, which names the setting ``what``, where this thread is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"{what}: only the main thread can listen to signals, and this is thread "
            f"{threading.current_thread().name}; call tierfall.open on the main thread, or leave the signals out"
        )


def stop(listener: Listener) -> None:
    """Stop listening; may be called twice. A work function that has begun continues, and the signal's previous effect
    follows it.

    The last listener restores the previous handler, unless another handler was installed meanwhile.
    """
    _hub.remove(listener)


def ends_process(number: Signals) -> bool:
    """Return whether a signal ends the process now, once all work functions have ended."""
    return number not in _HARMLESS and _hub.effect(number) is signal.SIG_DFL


class _SignalHub:
    """All listeners of this process, and the handlers before them.

    The handler runs on the main thread some time after the signal has arrived, perhaps after the work functions have
    ended: the last of them causes the previous effect. ``_seen`` are signals whose handler ran first; whoever removes
    one from it causes the effect. Nothing here holds a lock: the handler may interrupt anything.

    ``_running`` are listeners whose work function has begun and not ended, ``_due`` the signals that have their
    previous effect once there is none. ``_installed`` has the latest handler of each signal.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._running: list[Listener] = []
        self._installed: dict[Signals, _Handler] = {}
        self._due: set[Signals] = set()
        self._seen: set[Signals] = set()
        self._passing: set[Signals] = set()
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._other_fd = -1
        self._forking = threading.local()

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)
        if self._receiver is None:
            self._open()
        for number in listener.signals:
            found, ours = signal.getsignal(number), self._installed.get(number)
            if ours is None or found is not ours:
                self._passing.discard(number)
                self._seen.discard(number)
                self._installed[number] = _Handler(found)
                signal.signal(number, self._installed[number])

    def remove(self, listener: Listener) -> None:
        if listener not in self._listeners:
            return
        self._listeners.remove(listener)
        if threading.current_thread() is not threading.main_thread():
            return  # the handler stays, and has the previous one's effect
        for number in listener.signals - {n for one in self._listeners for n in one.signals}:
            self._installed[number].restore(number)
        if not self._listeners:
            self._close()

    # Arrival ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._other_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(self._receiver,), name="tierfall-signals", daemon=True
        ).start()

    def _close(self) -> None:
        assert self._sender is not None
        now = signal.set_wakeup_fd(-1)
        # another one was set meanwhile, and stays
        wanted = self._other_fd if now == self._sender.fileno() else now
        try:
            signal.set_wakeup_fd(wanted)
        except (OSError, ValueError) as error:
            logger.debug("the previous wakeup fd %d is closed: %s", wanted, error)
        self._sender.close()  # which ends the thread
        self._receiver = self._sender = None

    def _listen(self, receiver: socket.socket) -> None:
        with receiver:
            while received := receiver.recv(64):
                if self._other_fd >= 0:
                    _pass_bytes(self._other_fd, received)
                for number in set(received) & set(self._installed):
                    self._begin(Signals(number))

    def _begin(self, number: Signals) -> None:
        works = [x for x in self._listeners if x.work and number in x.signals]
        fresh = [x for x in works if not x.begun]
        self._running += fresh
        for listener in fresh:
            listener.begun = True
            threading.Thread(
                target=self._work, args=(listener, number), name="tierfall-signalled", daemon=True
            ).start()
        if works:
            self._due.add(number)
            self._pass_due()

    def _work(self, listener: Listener, number: Signals) -> None:
        assert listener.work is not None
        try:
            listener.work(number)
        except BaseException:  # no caller: it is logged, and the signal has its previous effect
            logger.exception("what was to be done on %s failed", number.name)
        finally:
            wait_for_messages()  # before the user's handler writes anything
            listener.ended = True
            self._running.remove(listener)
            self._pass_due()

    def _pass_due(self) -> None:
        for number in tuple(self._due):
            if not self._running and _taken_from(self._due, number):
                self._pass_on(number)

    # The previous effect ---------------------------------------------------------------------------

    def _pass_on(self, number: Signals) -> None:
        """Cause a signal's previous effect, now that the work functions have ended."""
        effect = self.effect(number)
        if effect is signal.SIG_DFL:
            self._take_default_action(number)
        elif effect is signal.SIG_IGN:
            self._seen.discard(number)
        elif _taken_from(self._seen, number):
            if signal.getsignal(number) is self._installed[number]:
                self._passing.add(number)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)

    def effect(self, number: Signals) -> Any:
        """Return a signal's effect after the work functions."""
        now = signal.getsignal(number)
        return now.previous if isinstance(now, _Handler) else now

    def handle(self, ours: _Handler, number: Signals, frame: FrameType | None) -> None:
        """Handle a signal, on the main thread."""
        if ours is not self._installed.get(number) or _taken_from(self._passing, number):
            self._call_previous(ours, number, frame)
            return
        listeners = [x for x in self._listeners if number in x.signals]
        for listener in listeners:
            if listener.flag is not None:
                listener.flag(number)
        if any(x.work for x in listeners):
            self._seen.add(number)
            if not all(x.ended for x in listeners if x.work):
                if self._sender is not None:  # our wakeup fd may have been replaced
                    _pass_bytes(self._sender.fileno(), bytes([number]))
                return
            if not _taken_from(self._seen, number):
                return
        elif listeners and ours.previous is signal.SIG_DFL:
            return  # flags alone
        self._call_previous(ours, number, frame)

    def _call_previous(self, ours: _Handler, number: Signals, frame: FrameType | None) -> None:
        if ours.previous is signal.SIG_DFL:
            self._take_default_action(number)
        elif callable(ours.previous):
            ours.previous(number, frame)

    def _take_default_action(self, number: Signals) -> None:
        """Cause the signal's default action, from any thread: the main thread may be stuck in C."""
        if number not in _HARMLESS:
            wait_for_messages()
        ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(None))  # SIG_DFL
        os.kill(os.getpid(), number)
        if os.getpid() == 1 and number not in _HARMLESS:
            os._exit(128 + number)

    # Forks -----------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Block signals: one that the child receives before ``after_in_child`` would arrive in this process."""
        self._forking.mask = None
        if self._receiver is not None:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._installed)

    def after_in_parent(self) -> None:
        if self._forking.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_in_child(self) -> None:
        if self._forking.mask is None:
            return
        signal.set_wakeup_fd(-1)
        for number, ours in self._installed.items():
            ours.restore(number)
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()
        self._listeners, self._running, self._receiver, self._sender = [], [], None, None
        self._due.clear()
        self.after_in_parent()


class _Handler:
    """The handler of one signal, from one installation until the next; ``previous`` is what it replaced. A handler that
    was installed over it may still call it once the hub has installed another one: then it only passes on."""

    def __init__(self, previous: Any) -> None:
        # Python can neither call nor restore a handler that a C library has installed.
        self.previous = signal.SIG_DFL if previous is None else previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _hub.handle(self, Signals(number), frame)

    def restore(self, number: Signals) -> None:
        """Restore what this has replaced, unless another handler was installed meanwhile."""
        now: object = signal.getsignal(number)
        if now is self:
            signal.signal(number, self.previous)


def _taken_from(signals: set[Signals], number: Signals) -> bool:
    """Remove a signal from the set; False where another thread has."""
    try:
        signals.remove(number)
    except KeyError:
        return False
    return True


def _pass_bytes(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError as error:  # full: its reader wakes anyway; or closed by its owner
        logger.debug("a signal was not passed on to fd %d: %s", fd, error)


_hub = _SignalHub()
os.register_at_fork(
    before=_hub.before_fork,
    after_in_parent=_hub.after_in_parent,
    after_in_child=_hub.after_in_child,
)
