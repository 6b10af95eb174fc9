"""What goes wrong around a job: a run's name used twice, wrong clocks, a rank 0 that stands still."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.distributed.job import Job, stopped

PROGRAM = Path(__file__).with_name("elastic_program.py")
MakeJob = Callable[..., Job]


@pytest.mark.parametrize("call", [pytest.param("restore", marks=pytest.mark.torture), "close"])
def test_a_rank_0_that_stands_still_for_good_holds_nobody_for_ever(
    make_job: MakeJob, tmp_path: Path, call: str
) -> None:
    job = make_job(2, program=PROGRAM).start("give_up_on_stall", call=call, max_wait="3s")
    job.wait_ready()
    with stopped(job, 0):
        (tmp_path / "stalled").touch()
        out, _ = job.processes[1].communicate(timeout=60)
    answer = json.loads(out.partition("ANSWER ")[2])
    assert answer["seconds"] < 25.0
    said = " ".join(answer["said"]) + job.log(1)
    assert f"{call}: rank 1: rank 0 gave no answer within" in said


@pytest.mark.torture
def test_a_store_of_the_launcher_that_falls_silent_is_reported_within_its_bound(
    make_job: MakeJob,
) -> None:
    job = make_job(2, program=PROGRAM)
    with falling_silent(job.store.port, after_bytes=600) as port:
        job.port = port
        job.start_rank(1, "meet_silence", max_wait="3s")
        (answer,) = job.wait()
    assert answer["seconds"] < 20.0
    assert "rank 1" in answer["said"]
    assert "does not answer" in answer["said"]


@contextmanager
def falling_silent(port: int, *, after_bytes: int) -> Iterator[int]:
    """A way to a server on this machine that hands on so many bytes of what it is sent, and then nothing more."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = [listener]
    left = after_bytes

    def carry(source: socket.socket, target: socket.socket, *, counted: bool) -> None:
        nonlocal left
        with suppress(OSError):  # closed at the end, by either side
            while data := source.recv(4096):
                if counted:
                    left -= len(data)
                if left <= 0:
                    return  # held open, and never answered
                target.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                inside, _ = listener.accept()
                outside = socket.create_connection(("127.0.0.1", port))
                sockets.extend((inside, outside))
                for ends, counted in (((inside, outside), True), ((outside, inside), False)):
                    threading.Thread(
                        target=carry, args=ends, kwargs={"counted": counted}, daemon=True
                    ).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for one in sockets:
            one.close()
