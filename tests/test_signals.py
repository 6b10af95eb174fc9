"""Signals: the drain runs at once whatever the main thread does, then the signal has its previous effect; flags;
forks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from signal import Signals

import pytest

from tests import forked
from tierfall.launch import signal_hub

USR1, TERM = Signals.SIGUSR1, Signals.SIGTERM
PROGRAM = """
import hashlib, os, signal, sys, threading, time
from tierfall.launch import signal_hub as signals
say = lambda *words: print(*words, flush=True)
def busy(seconds):
    "In C, where no handler of Python runs."
    count = 100_000
    began = time.monotonic()
    hashlib.pbkdf2_hmac("sha512", b"", b"", count)
    hashlib.pbkdf2_hmac("sha512", b"", b"", int(count * seconds / (time.monotonic() - began)))
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["-c", PROGRAM + body], timeout=120)


def wait_for(done: Callable[[], object]) -> None:
    ends = time.monotonic() + 30
    while not done():
        assert time.monotonic() < ends, "it did not come to that in 30 s"
        time.sleep(0.005)  # the handler runs in between


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """What was called, in order; SIGUSR1 has a handler of the user's that notes itself and its thread."""
    noted: list[str] = []

    def users(number: int, frame: object) -> None:
        noted.append(f"user's on {threading.current_thread().name}")

    # a listener that another thread stopped has left its wakeup fd; the next one to stop here would close that
    signal_hub.stop(signal_hub.add_listener({USR1}, what="a test", flag=lambda number: None))
    before, fd = signal.signal(USR1, users), signal.set_wakeup_fd(-1)
    yield noted
    assert signal.getsignal(USR1) is users, "the user's handler was not put back"
    assert signal.set_wakeup_fd(fd) == -1, "the wakeup fd was not put back"
    signal.signal(USR1, before)


def test_a_work_runs_while_the_main_thread_is_in_c_and_the_process_then_ends_by_the_signal() -> (
    None
):
    done = run(
        """
signals.add_listener({signal.SIGTERM}, what="test", work=lambda n: (time.sleep(0.2), say("worked on", n.name)))
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
began = time.monotonic()
busy(20)
say("the main thread came back")
"""
    )
    assert done.stdout == "worked on SIGTERM\n", done.stderr
    assert done.returncode == -TERM


def test_the_previous_handler_runs_once_on_the_main_thread_after_all_works(
    calls: list[str],
) -> None:
    gate = threading.Event()

    def slow(number: Signals) -> None:
        gate.wait(30)
        calls.append("slow work")

    listeners = [
        signal_hub.add_listener(
            {USR1}, what="test", work=lambda number: calls.append("quick work")
        ),
        signal_hub.add_listener({USR1}, what="test", work=slow),
    ]
    os.kill(os.getpid(), USR1)
    wait_for(lambda: calls == ["quick work"])
    time.sleep(0.1)
    assert calls == ["quick work"], "the handler did not wait for all works"
    gate.set()
    wait_for(lambda: len(calls) == 3)
    time.sleep(0.1)
    assert calls == ["quick work", "slow work", "user's on MainThread"]
    os.kill(os.getpid(), USR1)  # a work is done for the first alone
    wait_for(lambda: len(calls) == 4)
    assert calls[3:] == ["user's on MainThread"]
    for listener in listeners:
        signal_hub.stop(listener)


def test_signals_while_a_work_goes_on_wait_for_it_and_none_is_lost(calls: list[str]) -> None:
    gate = threading.Event()
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append("second"))
    listener = signal_hub.add_listener(
        {USR1, Signals.SIGUSR2}, what="test", work=lambda number: gate.wait(30)
    )
    for number in (USR1, Signals.SIGUSR2, USR1):
        os.kill(os.getpid(), number)
        time.sleep(0.02)
    assert calls == []
    gate.set()
    wait_for(lambda: len(calls) == 2)
    assert sorted(calls) == ["second", "user's on MainThread"]
    signal_hub.stop(listener)
    signal.signal(signal.SIGUSR2, previous)


def test_an_ignored_signal_is_ignored_after_the_work() -> None:
    done = run(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ended = threading.Event()
listener = signals.add_listener({signal.SIGTERM}, what="test", work=lambda number: (say("work"), ended.set()))
os.kill(os.getpid(), signal.SIGTERM)
ended.wait(30)
os.kill(os.getpid(), signal.SIGTERM)
signals.stop(listener)
os.kill(os.getpid(), signal.SIGTERM)
say("lives", signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
"""
    )
    assert done.stdout == "work\nlives True\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("thread", [False, True])
def test_a_forked_child_ends_by_the_signal_and_its_parent_receives_nothing(thread: bool) -> None:
    fork = "t = threading.Thread(target=fork); t.start(); t.join()" if thread else "fork()"
    done = run(
        f"""
listener = signals.add_listener({{signal.SIGTERM}}, what="test", work=lambda number: say("work"))
def fork():
    child = os.fork()
    if child == 0:
        for _ in range(600):  # a signal that comes right before a sleep is noticed after it
            time.sleep(0.1)
        os._exit(3)
    os.kill(child, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
{fork}
time.sleep(0.2)
say(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    )
    assert done.stdout == f"{-TERM}\nFalse\n", done.stderr
    assert done.returncode == 0


def test_a_signal_is_received_after_an_event_loop_took_the_wakeup_fd(calls: list[str]) -> None:
    listener = signal_hub.add_listener(
        {USR1}, what="test", work=lambda number: calls.append("work")
    )

    async def loop() -> None:
        asyncio.get_running_loop().add_signal_handler(Signals.SIGUSR2, int)
        os.kill(os.getpid(), USR1)
        while len(calls) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(loop(), 30))
    assert calls == ["work", "user's on MainThread"]
    signal_hub.stop(listener)
