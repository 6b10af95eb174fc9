"""``tierfall.load`` ends where a tier does not answer: from another tier, or with an error that names this one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import tierfall
from tests.stuck_tier import LONG_S, StuckTier, config_of, state
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import RestoreError
from tierfall.ops import reader
from tierfall.setup import tiers

STEP = "r/step-00000001-a0001"
READS = ["commit.json", ".safetensors"]


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckTier]:
    """The tier ``near`` of the run, before it hangs. The least time that tiers have to answer is short."""
    for where, name in ((tiers, "ANSWER_S"), (reader, "ANSWER_S"), (reader, "PATH_ANSWER_S")):
        monkeypatch.setattr(where, name, 0.5)
    with tierfall.open(config_of(tmp_path, "near", "far", max_wait="1s")) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
    stuck = StuckTier(tmp_path / "near", monkeypatch)
    yield stuck
    stuck.gate.set()


def hang(stuck: StuckTier, word: str) -> None:
    """Let a step of a load hang: a read of a file is named by its name."""
    if word in READS:
        stuck.hang_in("read_into", key=word)
    else:
        stuck.hang_in(word)


@pytest.fixture
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < LONG_S / 2


@pytest.mark.parametrize("word", ["open", "commit.json", ".safetensors"])
def test_a_step_that_another_tier_has_is_loaded_from_there(
    stuck: StuckTier, tmp_path: Path, soon: None, word: str
) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, "near", "far", max_wait="1s")))
    hang(stuck, word)
    assert bool((tierfall.load(file, step=1)["x"] == 1).all())
    assert stuck.hung.is_set()


@pytest.mark.parametrize(
    ("word", "path"), [("scan", "near"), ("open", f"near/{STEP}"), (".safetensors", f"near/{STEP}")]
)
def test_a_path_whose_file_system_hangs_is_named(
    stuck: StuckTier, tmp_path: Path, soon: None, word: str, path: str
) -> None:
    hang(stuck, word)
    with pytest.raises(RestoreError, match=f"{tmp_path}/near.* has not answered") as caught:
        tierfall.load(tmp_path / path)
    assert stuck.hung.is_set()
    assert "load from another tier's folder" in str(caught.value)


def test_ctrl_c_ends_a_load_that_waits_for_a_tier(
    stuck: StuckTier, tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PATH_ANSWER_S", 10 * LONG_S)
    stuck.hang_in("read_into", key=".safetensors")
    real, reads = PosixBackend.read_into, []

    def first(backend: PosixBackend, key: str, offset: int, view: memoryview) -> None:
        if ".safetensors" in key and not offset:  # the header, which the main thread reads
            with open(Path(backend.place) / key, "rb") as file:
                file.readinto(view)
            return
        reads.append(offset)
        real(backend, key, offset, view)

    monkeypatch.setattr(PosixBackend, "read_into", first)

    def press() -> None:
        stuck.hung.wait(LONG_S)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        tierfall.load(tmp_path / "near")
    assert reads
