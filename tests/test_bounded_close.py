"""``close``, and the end of a program, where a tier does not answer: within ``max_wait`` and a few seconds, and what is
owed stays in memory for the next start."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests import forked
from tests.stuck_tier import CALLS, LONG_S, WRITES, StuckTier, config_of, state
from tierfall.core.types.errors import FlushError
from tierfall.setup import tiers

EVERYTHING = (*CALLS, *WRITES)


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckTier]:
    """The tier ``pfs`` of the run, before it hangs."""
    monkeypatch.setattr(tiers, "ANSWER_S", 0.5)
    stuck = StuckTier(tmp_path / "pfs", monkeypatch)
    yield stuck
    stuck.gate.set()


def opened_with_step_1(made: dict[str, Any]) -> tierfall.Checkpointer:
    ckpt = tierfall.open(made)
    ckpt.restore(state(0))
    ckpt.save(1, state(1), block=True)
    return ckpt


def close_soon(ckpt: tierfall.Checkpointer) -> None:
    began_s = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began_s < LONG_S / 2
    stays = [t.name for t in threading.enumerate() if "tierfall" in t.name and not t.daemon]
    assert stays == []  # the interpreter would wait for it


@pytest.mark.parametrize("calls", [("publish",), EVERYTHING], ids=["publish", "everything"])
def test_what_a_stuck_tier_is_owed_is_reported_and_stays_for_the_next_start(
    stuck: StuckTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, calls: tuple[str, ...]
) -> None:
    made = config_of(tmp_path, "disk", "pfs")
    ckpt = opened_with_step_1(made)
    stuck.hang_in(*calls)
    handle = ckpt.save(2, state(2))
    handle.wait("disk", LONG_S)
    assert stuck.hung.wait(LONG_S)
    close_soon(ckpt)
    assert "still owed: 2@1 to pfs" in caplog.text
    assert "abandoned: tierfall-r-pfs" in caplog.text
    with pytest.raises(FlushError, match="the run was closed before this was done"):
        handle.wait("pfs", 0)
    stuck.gate.set()
    with tierfall.open(made) as again:
        assert again.drain(LONG_S).left == ()
    assert bool((tierfall.load(tmp_path / "pfs", step=2)["x"] == 2).all())


def test_memory_stays_where_the_tier_that_has_its_images_cannot_be_looked_at(
    stuck: StuckTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = config_of(tmp_path, "disk", "pfs")
    del made["tiers"][1]
    ckpt = opened_with_step_1(made)
    stuck.hang_in(*EVERYTHING)
    close_soon(ckpt)
    assert "1@1 was not looked at" in caplog.text
    assert "1@1 is in the memory of this machine alone, unless pfs has it" in caplog.text
    assert "tier pfs was not closed" in caplog.text
    assert list((tmp_path / "memory/r").glob("*/slot-0.*.image"))


def test_ctrl_c_in_close_waits_for_no_tier(
    stuck: StuckTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = config_of(tmp_path, "disk", "pfs", max_wait="10m")
    ckpt = opened_with_step_1(made)
    stuck.hang_in(*EVERYTHING)
    ckpt.save(2, state(2)).wait("disk", LONG_S)
    assert stuck.hung.wait(LONG_S)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert time.monotonic() - began_s < LONG_S / 2
    assert list((tmp_path / "memory/r").glob("*/slot-0.*.image"))
    newest = "its newest checkpoint is 2@1, on host, disk; a restart continues there"
    assert f"run r is closed; {newest}" in caplog.text


PROGRAM = """
import json, sys, threading
import torch, tierfall
from tierfall.backends.posix.backend import PosixWriter
from tierfall.setup import tiers

tiers.ANSWER_S = 0.5
made = json.loads(sys.argv[1])
ckpt = tierfall.open(made)
ckpt.restore({"x": torch.zeros(8192)})
hung, write = threading.Event(), PosixWriter.write

def hang(writer, *args):
    if writer._place.endswith("pfs"):
        hung.set()
        threading.Event().wait()
    write(writer, *args)

PosixWriter.write = hang
ckpt.save(1, {"x": torch.ones(8192)}).wait("disk", 60)
assert hung.wait(60)
print("at the end")
"""


@pytest.mark.parametrize("end", ["ckpt.close()", "sys.exit(3)"])
def test_a_program_ends_beside_a_thread_that_hangs(tmp_path: Path, end: str) -> None:
    made = config_of(tmp_path, "disk", "pfs")
    done = forked.run(["-c", PROGRAM + end, json.dumps(made)], timeout=2 * LONG_S)
    assert done.stdout == "at the end\n", done.stderr
    assert done.returncode == (3 if "exit" in end else 0)
    with tierfall.open(made) as again:
        assert again.drain(LONG_S).left == ()
    assert bool((tierfall.load(tmp_path / "pfs")["x"] == 1).all())
