"""A tier that does not answer holds up nothing for longer than its bound: neither ``open``, nor a restore, a load or a
command, nor ``close`` or the end of a program. Each names it, and Ctrl-C ends them at once."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import tierfall
from tests import forked
from tests.stuck_tier import CALLS, LONG_S, WRITES, StuckTier, config_of, state
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli.app import app
from tierfall.core.runtime.buffers import BufferPool, begin_filling, end_filling
from tierfall.core.types.errors import FlushError, RestoreError
from tierfall.ops import commands, reader, sync
from tierfall.setup import tiers

EVERYTHING = (*CALLS, *WRITES)
STEP = "r/step-00000001-a0001"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time that a tier has to answer is short here."""
    for where in (tiers, reader, commands, sync):
        monkeypatch.setattr(where, "ANSWER_S", 0.5)
    monkeypatch.setattr(reader, "PATH_ANSWER_S", 0.5)


@pytest.fixture
def stick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StuckTier]]:
    """``stick("near")``: the tier of that name, before it hangs; nothing is read of it from the page cache."""
    made: list[StuckTier] = []

    def make(name: str) -> StuckTier:
        monkeypatch.setattr(PosixBackend, "read_cached", lambda *args: False)
        made.append(StuckTier(tmp_path / name, monkeypatch))
        return made[-1]

    yield make
    for stuck in made:
        stuck.gate.set()


@pytest.fixture
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < LONG_S / 2


def hang(stuck: StuckTier, word: str) -> None:
    """Let a kind of call hang: a read of a file is named by its name."""
    if word in ("commit.json", ".safetensors"):
        stuck.hang_in("read_into", key=word)
    else:
        stuck.hang_in(word)


def opened(made: dict[str, Any], *steps: int) -> tierfall.Checkpointer:
    """Open a run, and save these steps."""
    ckpt = tierfall.open(made)
    ckpt.restore(state(0))
    for step in steps:
        ckpt.save(step, state(step), block=True)
    return ckpt


def is_of(step: int, found: dict[str, Any]) -> bool:
    return bool((found["x"] == step).all())


def press_ctrl_c(stuck: StuckTier) -> None:
    """Send SIGINT to the main thread once a call hangs."""

    def press() -> None:
        assert stuck.hung.wait(LONG_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


# Opening and restoring -------------------------------------------------------------------------------


@pytest.fixture
def near_and_far(tmp_path: Path) -> dict[str, Any]:
    near = {"name": "near", "max_wait": "0.5s"}
    return config_of(tmp_path, near, {"name": "far", "shared": True}, max_wait="60s")


def test_a_mount_that_hangs_for_everyone_is_not_looked_at_and_never_counts_as_empty(
    near_and_far: dict[str, Any], stick: Callable[..., StuckTier]
) -> None:
    opened(near_and_far, 1).close()
    stick("near").hang_in("open")
    with tierfall.open(near_and_far) as ckpt:
        with pytest.raises(RestoreError, match="near"):
            ckpt.restore(state(0))
        assert ckpt.restore(state(0), unreachable="ignore") is not None


@pytest.mark.parametrize(
    ("what", "compress"), [("", {}), (".safetensors", {"compress": {"codec": "zstd"}})]
)
def test_a_restore_goes_on_from_the_next_tier_where_one_stops_answering(
    near_and_far: dict[str, Any],
    stick: Callable[..., StuckTier],
    soon: None,
    what: str,
    compress: dict[str, Any],
) -> None:
    """Also what it answers once it is too late changes nothing."""
    near_and_far["tiers"][1] |= compress
    opened(near_and_far, 1, 2).close()
    stuck = stick("near")
    with tierfall.open(near_and_far) as ckpt:
        stuck.hang_in("read_into", key=f"step-00000002-a0001/{'rank-' if what else ''}")
        found = state(0)
        report = ckpt.restore(found)
        assert report.step == 2
        assert is_of(2, found)
        assert stuck.hung.is_set()
        assert any("has not answered" in str(f) for f in report.fallbacks)
        stuck.gate.set()
        assert stuck.returned.wait(LONG_S)
        for step in (1, 2):
            there = state(0)
            assert ckpt.restore(there, step=step).step == step
            assert is_of(step, there)
        assert is_of(2, found)


def test_a_restore_from_one_tier_alone_that_stops_answering_says_so_within_its_bound(
    tmp_path: Path, stick: Callable[..., StuckTier], soon: None
) -> None:
    made = config_of(tmp_path, {"name": "near", "max_wait": "0.5s"}, max_wait="60s")
    opened(made, 1).close()
    stuck = stick("near")
    with tierfall.open(made) as ckpt:
        hang(stuck, ".safetensors")
        found = state(0)
        with pytest.raises(RestoreError, match="has not answered"):
            ckpt.restore(found)
        stuck.gate.set()
        assert stuck.returned.wait(LONG_S)
        assert ckpt.restore(found).step == 1
        assert is_of(1, found)


@pytest.mark.parametrize("call", ["publish", "scan"])
def test_a_tier_that_is_there_and_does_not_answer_a_call_of_open_does_not_hold_it(
    tmp_path: Path, stick: Callable[..., StuckTier], soon: None, call: str
) -> None:
    """As a store does that lists its objects, and accepts writes that it never answers."""
    stick("pfs").hang_in(call)
    with tierfall.open(config_of(tmp_path, "disk", "pfs"), fresh=True) as ckpt:
        ckpt.save(1, state(1)).wait("disk", LONG_S)


def test_memory_that_a_late_read_fills_is_not_lent_again() -> None:
    pool = BufferPool(bytes=4096, count=1)
    with pool.lend_view(4096) as view:
        begin_filling(view)
    with pool.lend_view(4096) as other:
        assert other.obj is not view.obj
    end_filling(view)
    pool.release()


# load ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, stick: Callable[..., StuckTier]) -> StuckTier:
    """The tier ``near`` of a run that has step 1 on it and on ``far``."""
    made = config_of(tmp_path, "near", "far", max_wait="1s")
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(made))
    opened(made, 1).close()
    return stick("near")


@pytest.mark.parametrize("word", ["open", "commit.json", ".safetensors"])
def test_a_step_that_another_tier_has_is_loaded_from_there(
    saved: StuckTier, tmp_path: Path, soon: None, word: str
) -> None:
    hang(saved, word)
    assert is_of(1, tierfall.load(tmp_path / "tiers.yaml", step=1))
    assert saved.hung.is_set()


@pytest.mark.parametrize(
    ("word", "path"), [("scan", "near"), ("open", f"near/{STEP}"), (".safetensors", f"near/{STEP}")]
)
def test_a_path_whose_file_system_hangs_is_named(
    saved: StuckTier, tmp_path: Path, soon: None, word: str, path: str
) -> None:
    hang(saved, word)
    with pytest.raises(RestoreError, match=f"{tmp_path}/near.* has not answered") as caught:
        tierfall.load(tmp_path / path)
    assert saved.hung.is_set()
    assert "load from another tier's folder" in str(caught.value)


def test_ctrl_c_ends_a_load_that_waits_for_a_tier(
    saved: StuckTier, tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PATH_ANSWER_S", 10 * LONG_S)
    saved.hang_in("read_into", key=".safetensors", from_byte=1)  # the main thread reads the header
    press_ctrl_c(saved)
    with pytest.raises(KeyboardInterrupt):
        tierfall.load(tmp_path / "near")


# Commands --------------------------------------------------------------------------------------------


def write_file(root: Path, max_wait: str = "0.5s") -> dict[str, Any]:
    near = {"name": "near", "flush": {"every": 9}}
    made = config_of(root, "far", near, max_wait=max_wait)
    (root / "tiers.yaml").write_text(yaml.safe_dump(made))
    return made


@pytest.fixture
def owing(tmp_path: Path, stick: Callable[..., StuckTier]) -> StuckTier:
    """The tier ``near`` of a run whose steps 1 and 2 only ``far`` has."""
    opened(write_file(tmp_path), 1, 2).close()
    return stick("near")


@pytest.fixture
def held(owing: StuckTier, tmp_path: Path) -> StuckTier:
    """``near`` has step 1 too."""
    assert call(tmp_path, "copy", "1", "--to", "near").exit_code == 0
    return owing


def call(root: Path, *words: str) -> Result:
    """Run a command, which must end long before the tier would answer."""
    began_s = time.monotonic()
    done = CliRunner().invoke(app, [*words, "--config", str(root / "tiers.yaml")])
    assert time.monotonic() - began_s < LONG_S / 3
    return done


@pytest.mark.parametrize("word", ["open", ".safetensors", "close"])
def test_verify_names_the_tier_that_does_not_answer_and_verifies_the_others(
    held: StuckTier, tmp_path: Path, word: str
) -> None:
    hang(held, word)
    done = call(tmp_path, "verify")
    assert held.hung.is_set()
    if word != "close":
        assert done.exit_code == 1
        assert "near has not answered for 0." in done.output.replace("\n", " ")
    assert f"run r: {3 if word == 'close' else 2} of " in done.output
    assert "nothing is damaged" in done.output


def test_copy_names_the_tier_that_does_not_take_a_copy(owing: StuckTier, tmp_path: Path) -> None:
    hang(owing, "publish")
    done = call(tmp_path, "copy", "2", "--to", "near")
    assert done.exit_code != 0
    assert owing.hung.is_set()
    assert "near has not answered for 0." in done.output.replace("\n", " ")
    assert tierfall.load(tmp_path / "far", step=2)["x"][0] == 2
    owing.gate.set()
    for thread in threading.enumerate():
        if thread.name == "tierfall-call":  # a call that was left behind
            thread.join(LONG_S)
    assert call(tmp_path, "copy", "2", "--to", "near").exit_code == 0
    assert call(tmp_path, "verify").exit_code == 0


def test_check_names_the_tier_that_does_not_answer_and_measures_the_others(
    owing: StuckTier, tmp_path: Path
) -> None:
    hang(owing, "read_into")
    done = call(tmp_path, "check", "--size", "64KiB")
    assert owing.hung.is_set()
    assert done.exit_code == 1
    assert "tierfall: tier near: read: tier near has not answered for 0." in done.output


@pytest.mark.parametrize(
    ("words", "kind"),
    [(("verify",), ".safetensors"), (("copy", "2", "--to", "near"), "publish")],
)
def test_the_first_ctrl_c_ends_a_command_that_waits_for_a_tier(
    held: StuckTier, tmp_path: Path, words: tuple[str, ...], kind: str
) -> None:
    write_file(tmp_path, max_wait="10m")
    hang(held, kind)
    press_ctrl_c(held)
    assert call(tmp_path, *words).exit_code == 130
    assert held.hung.is_set()


# close -----------------------------------------------------------------------------------------------


def close_soon(ckpt: tierfall.Checkpointer) -> None:
    ckpt.close()
    stays = [t.name for t in threading.enumerate() if "tierfall" in t.name and not t.daemon]
    assert stays == []  # the interpreter would wait for it


@pytest.mark.parametrize("calls", [("publish",), EVERYTHING], ids=["publish", "everything"])
def test_what_a_stuck_tier_is_owed_is_reported_and_stays_for_the_next_start(
    stick: Callable[..., StuckTier],
    tmp_path: Path,
    soon: None,
    caplog: pytest.LogCaptureFixture,
    calls: tuple[str, ...],
) -> None:
    made = config_of(tmp_path, "disk", "pfs")
    ckpt, stuck = opened(made, 1), stick("pfs")
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
    assert is_of(2, tierfall.load(tmp_path / "pfs", step=2))


def test_memory_stays_where_the_tier_that_has_its_images_cannot_be_looked_at(
    stick: Callable[..., StuckTier], tmp_path: Path, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = opened(config_of(tmp_path, "pfs"), 1)
    stick("pfs").hang_in(*EVERYTHING)
    close_soon(ckpt)
    assert "1@1 was not looked at" in caplog.text
    assert "1@1 is in the memory of this machine alone, unless pfs has it" in caplog.text
    assert "tier pfs was not closed" in caplog.text
    assert list((tmp_path / "memory/r").glob("*/slot-0.*.image"))


def test_ctrl_c_in_close_waits_for_no_tier(
    stick: Callable[..., StuckTier], tmp_path: Path, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, stuck = opened(config_of(tmp_path, "disk", "pfs", max_wait="10m"), 1), stick("pfs")
    stuck.hang_in(*EVERYTHING)
    ckpt.save(2, state(2)).wait("disk", LONG_S)
    assert stuck.hung.wait(LONG_S)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
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
    assert is_of(1, tierfall.load(tmp_path / "pfs"))
