"""``verify``, ``copy`` and ``check`` end where a tier does not answer: each names it, and Ctrl-C ends them at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import tierfall
from tests.stuck_tier import LONG_S, StuckTier, config_of, state
from tierfall.cli.app import app
from tierfall.ops import commands, reader, sync
from tierfall.setup import tiers

READS = ("stat", "commit.json", "rank-00000-of-00001.json", ".safetensors")
SOON_S = 10.0
IMAGE_S = 20.0
"""More than the time that the bytes of an image, and of a check, may take; less than tiers hang."""


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckTier]:
    """The tier ``near`` of the run, before it hangs. Only ``far`` has step 2."""
    for where in (tiers, reader, commands, sync):
        monkeypatch.setattr(where, "ANSWER_S", 0.5)
    with tierfall.open(config(tmp_path)) as ckpt:
        ckpt.restore(state(0))
        for step in (1, 2):
            ckpt.save(step, state(step), block=True)
    stuck = StuckTier(tmp_path / "near", monkeypatch)
    yield stuck
    stuck.gate.set()


def config(root: Path, max_wait: str = "0.5s") -> dict[str, Any]:
    near = {"name": "near", "flush": {"every": 9}}
    made = config_of(root, "far", near, max_wait=max_wait)
    (root / "tiers.yaml").write_text(yaml.safe_dump(made))
    return made


def call(root: Path, *words: str) -> Result:
    """Run a command, which must end long before the tier would answer."""
    began_s = time.monotonic()
    done = CliRunner().invoke(app, [*words, "--config", str(root / "tiers.yaml")])
    assert time.monotonic() - began_s < IMAGE_S
    return done


def hang(stuck: StuckTier, word: str) -> None:
    """Let a kind of call hang: a read of a file is named by its name."""
    if word in READS and word != "stat":
        stuck.hang_in("read_into", key=word)
    else:
        stuck.hang_in(word)


@pytest.fixture
def held(stuck: StuckTier, tmp_path: Path) -> StuckTier:
    """``near`` holds step 1 too, which is not read from the page cache."""
    assert call(tmp_path, "copy", "1", "--to", "near").exit_code == 0
    return stuck


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tierfall.backends.posix.backend.PosixBackend.read_cached", lambda *args: False
    )


@pytest.mark.parametrize("word", ["open", ".safetensors", "close"])
def test_verify_names_the_tier_that_does_not_answer_and_verifies_the_others(
    held: StuckTier, uncached: None, tmp_path: Path, word: str
) -> None:
    hang(held, word)
    done = call(tmp_path, "verify")
    assert held.hung.is_set()
    if word != "close":
        assert done.exit_code == 1
        assert "near has not answered for 0." in done.output.replace("\n", " ")
    assert f"run r: {3 if word == 'close' else 2} of " in done.output
    assert "nothing is damaged" in done.output


def test_copy_names_the_tier_that_does_not_take_a_copy(stuck: StuckTier, tmp_path: Path) -> None:
    hang(stuck, "publish")
    done = call(tmp_path, "copy", "2", "--to", "near")
    assert done.exit_code != 0
    assert stuck.hung.is_set()
    assert "near has not answered for 0." in done.output.replace("\n", " ")
    assert tierfall.load(tmp_path / "far", step=2)["x"][0] == 2
    stuck.gate.set()
    wait_ended()
    assert call(tmp_path, "copy", "2", "--to", "near").exit_code == 0
    assert call(tmp_path, "verify").exit_code == 0


def test_check_names_the_tier_that_does_not_answer_and_measures_the_others(
    stuck: StuckTier, tmp_path: Path
) -> None:
    hang(stuck, "read_into")
    done = call(tmp_path, "check", "--size", "64KiB")
    assert stuck.hung.is_set()
    assert done.exit_code == 1
    assert "tierfall: tier near: read: tier near has not answered for 0." in done.output


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("verify",), ".safetensors"),
        (("copy", "2", "--to", "near"), "publish"),
    ],
)
def test_the_first_ctrl_c_ends_a_command_that_waits_for_a_tier(
    held: StuckTier, uncached: None, tmp_path: Path, words: tuple[str, ...], kind: str
) -> None:
    config(tmp_path, max_wait="10m")
    hang(held, kind)

    def press() -> None:
        held.hung.wait(LONG_S)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    began_s = time.monotonic()
    done = call(tmp_path, *words)
    assert time.monotonic() - began_s < SOON_S
    assert held.hung.is_set()
    assert done.exit_code == 130


def wait_ended() -> None:
    """Wait until the calls that were left behind have returned."""
    for thread in threading.enumerate():
        if thread.name == "tierfall-call":
            thread.join(LONG_S)
