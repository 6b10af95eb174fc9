"""What a person sees in the log: a condition when it begins and, at the same level, when it ends; a line at open and at
close."""

from __future__ import annotations

import logging
import os
import pty
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests import forked
from tests.memory_store import MemoryStore
from tests.steps import state_of, wait_until

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[tuple[str, str]]]:
    """``lines("text")``: level and message of what was logged with that text, at level WARNING or above."""
    caplog.set_level(logging.DEBUG, "tierfall")

    def lines_with(text: str) -> list[tuple[str, str]]:
        shown = (r for r in caplog.records if r.levelno >= logging.WARNING)
        return [(r.levelname, r.getMessage()) for r in shown if text in r.getMessage()]

    return lines_with


def test_a_tier_that_failed_is_said_to_work_again_at_the_same_level(
    store: MemoryStore, make_config: MakeConfig, lines: Callable[[str], list[tuple[str, str]]]
) -> None:
    config = make_config()
    config["tiers"] = [config["tiers"][0], store.tier(retain={"last": 9})]
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.refuse_all()
        handles = [ckpt.save(step, state_of(step)) for step in range(2, 6)]
        wait_until(lambda: handles[-1].exception() is not None, "it is reported")
        assert ckpt.statistics().flush_failures["store"] > 2
        began = [level for level, _ in lines("flush of")]
        assert began == ["WARNING", "ERROR"], "one outage, however often it is tried"
        assert lines("store accepts copies again") == []
        store.heal()
        assert ckpt.drain().left == ()
        end = "tier store accepts copies again; copies that it is still owed: 3"
        assert lines("store accepts copies again") == [("ERROR", end)]


def test_steps_that_outgrow_a_tier_or_memory_are_said_once_and_their_end_too(
    make_config: MakeConfig, lines: Callable[[str], list[tuple[str, str]]]
) -> None:
    config = make_config(small={"capacity": "250KiB"}, large={}, host={"capacity": "1MiB"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        for step in (2, 3):
            ckpt.save(step, state_of(step, elements=80_000), block=True)
        for step in (4, 5):
            ckpt.save(step, state_of(step, elements=800_000))
        ckpt.save(6, state_of(6), block=True).wait("small")
    assert [level for level, _ in lines("left out")] == ["ERROR"]
    assert lines("small has room") == [("ERROR", "tier small has room for a step again: 6@1")]
    assert [level for level, _ in lines("is skipped")] == ["WARNING"]
    fits = "step 6 fits into host memory again: saves are not skipped"
    assert lines("fits into") == [("WARNING", fits)]


def test_a_tier_that_fell_behind_is_said_to_have_caught_up_at_the_same_level(
    store: MemoryStore, make_config: MakeConfig, lines: Callable[[str], list[tuple[str, str]]]
) -> None:
    config = make_config()
    config["tiers"] = [config["tiers"][0], store.tier(flush={"within": "1s"})]
    with tierfall.open(config) as ckpt:
        store.refuse_all()
        handle = ckpt.save(1, state_of(1))
        wait_until(lambda: bool(lines("of flush.within")), "it is late")
        store.heal()
        wait_until(lambda: handle.done("store"), "it arrives")
        wait_until(lambda: bool(lines("store has caught up")), "that is said")
        levels = [lines(text)[0][0] for text in ("of flush.within", "store has caught up")]
        assert levels == ["WARNING", "WARNING"]


PROGRAM = """
    import sys, tierfall, torch
    host = {"name": "host", "kind": "host", "folder": sys.argv[1]}
    disk = {"name": "disk", "kind": "file", "path": sys.argv[2]}
    ckpt = tierfall.open({"run": "r", "tiers": [host, disk]})
    state = {"w": torch.zeros(4)}
    ckpt.restore(state)
    if ckpt.checkpoints() == []:
        ckpt.save(1, state, block=True)
    ckpt.close()
"""


def on_terminal(*words: str) -> list[str]:
    """Run the program with a terminal as stderr; return the lines that it shows there."""
    terminal, end = pty.openpty()
    command = ["-c", textwrap.dedent(PROGRAM), *words]
    with os.fdopen(end, "w") as stderr:
        program = forked.Forked(forked.server_of(), command, os.environ, stderr)
    shown = b""
    try:
        while data := os.read(terminal, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    program.communicate()
    assert program.returncode == 0, shown.decode()
    return shown.decode().split("\r\n")[:-1]


def test_open_and_close_show_a_line_each_on_a_terminal_and_none_elsewhere(
    tmp_path: Path, memory: Path
) -> None:
    words = str(memory), str(tmp_path / "disk")
    assert on_terminal(*words) == [
        "run r is open as attempt 1; no tier has a checkpoint of it",
        "run r is closed; its newest checkpoint is 1@1, on disk",
    ]
    assert on_terminal(*words) == [
        "run r is open as attempt 2; its newest checkpoint is 1@1, on disk",
        "run r is closed; its newest checkpoint is 1@1, on disk",
    ]
    done = forked.run(["-c", textwrap.dedent(PROGRAM), *words])
    assert (done.returncode, done.stderr) == (0, "")
