"""The demo's parts: its chain of tiers, its trainer process, and the checks behind its report."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.event_lines import last_events
from tests.steps import state_of, step_in
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId
from tierfall.demo import chain as chains
from tierfall.demo import story
from tierfall.demo.process import Act, DemoError, Line, Trainer, kill_leftovers
from tierfall.demo.screen import Screen
from tierfall.demo.story import Stage
from tierfall.demo.training import SMALL, Training, train
from tierfall.telemetry.event_log import LogTail


def step_line(step: int, loss: float) -> Line:
    return {"kind": "step", "wall_time_s": 1.0, "step": step, "loss": loss.hex(), "seconds": 0.1}


def restored_from(*tiers: str, step: int = 2, attempt: int = 1) -> Line:
    sources = [("shard", tier, 7) for tier in tiers]
    fallbacks = [("a chunk", "damaged")] if tiers == ("fast", "store") else []
    return {"step": step, "attempt": attempt, "sources": sources, "fallbacks": fallbacks}


# The chain --------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[chains.Chain]:
    """A chain whose steps 1 and 2 lie on file and object tier, as its ``flush`` wants it, and whose owner is gone."""
    made = chains.write_chain(tmp_path, SMALL, every=1, image_bytes=1000)
    with tierfall.open(made.config_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    yield made
    made.remove_memory()


@pytest.fixture
def stage(chain: chains.Chain) -> Iterator[Stage]:
    with closing(LogTail(chain.events)) as events:
        yield Stage(screen=Screen(), chain=chain, steps=12, every=1, small=True, events=events)


def test_chain_lies_on_disk_where_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    chain = chains.write_chain(tmp_path, SMALL, every=2, image_bytes=1000)
    assert chain.memory == tmp_path / "memory"
    assert chain.config.host.folder == chain.memory


def test_chain_is_read_back_with_any_folder_name(tmp_path: Path) -> None:
    folder = tmp_path / 'odd: name #1 "x" %41 \\'
    folder.mkdir()
    config = chains.write_chain(folder, SMALL, every=2, image_bytes=1000).config
    assert [tier.folder for tier in config.stored] == [folder / "fast", folder / "store"]


def test_chain_in_a_folder_that_has_no_address_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "what?"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"tiers\[2\]\.url"):
        chains.write_chain(folder, SMALL, every=2, image_bytes=1000)


def test_chain_takes_a_buckets_secrets_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "hidden")
    options = {"endpoint_url": "http://127.0.0.1:9", "secret": "${env:SOME_SECRET}"}
    bucket = chains.Bucket(url="s3://some-bucket/x", options=options)
    chain = chains.write_chain(tmp_path, SMALL, every=2, image_bytes=1000, bucket=bucket)
    tier: Any = chain.config.stored[1]
    assert (tier.url, tier.options) == ("s3://some-bucket/x", options | {"secret": "hidden"})
    assert "hidden" not in chain.config_path.read_text()


def test_flipped_byte_is_another_one_and_the_only_one(chain: chains.Chain) -> None:
    shard = chain.folder / "fast/demo/step-00000002-a0001/rank-00000-of-00001.safetensors"
    before = shard.read_bytes()
    path, offset = chains.flip_byte(chain, "fast", CheckpointId(2, 1))
    after = shard.read_bytes()
    differing = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert (path, [offset]) == (shard, differing)


def test_a_lost_node_leaves_the_object_tier_alone(stage: Stage) -> None:
    chain = stage.chain
    assert story.lose_node(stage) == CheckpointId(2, 1)
    assert not chain.memory.exists()
    assert not (chain.folder / "fast").exists()
    assert step_in(tierfall.load(chain.folder / "store")) == 2


@pytest.mark.parametrize(
    ("folder", "found"), [("fast", "fast, store"), ("store", "fast"), (None, "fast, store")]
)
def test_a_node_that_is_not_lost_or_lost_with_the_store_is_found(
    folder: str | None, found: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(chain: chains.Chain) -> None:
        if folder == "fast":
            shutil.rmtree(chain.memory)
        elif folder == "store":
            shutil.rmtree(chain.folder / "store")

    monkeypatch.setattr(chains, "delete_node_storage", lose)
    with pytest.raises(DemoError, match=rf"only store should hold .* found some on: {found}$"):
        story.lose_node(stage)


# What acts check --------------------------------------------------------------------------------------


def test_one_loss_that_differs_in_its_last_bit_is_found() -> None:
    steps = [step_line(1, 2.5), step_line(2, 2.25)]
    expected = {1: (2.5).hex(), 2: (2.25).hex()}
    assert story.check_equal(steps, expected, "after") == 2
    expected[2] = (2.2500000000000004).hex()
    with pytest.raises(DemoError, match=r"the loss of step 2, after, is 0x1\.2"):
        story.check_equal(steps, expected, "after")


def test_a_restore_from_another_tier_than_expected_is_found() -> None:
    story.check_sources(restored_from("store"), "store")
    story.check_sources(restored_from("fast", "store"), "fast", "store")
    for tiers in (("host",), ("fast", "store")):
        with pytest.raises(DemoError, match="expected store alone"):
            story.check_sources(restored_from(*tiers), "store")


def test_a_restore_that_did_not_fall_is_found() -> None:
    with pytest.raises(DemoError, match="was restored from fast; expected fast and store"):
        story.check_sources(restored_from("fast"), "fast", "store")
    with pytest.raises(DemoError, match="and the reason"):
        story.check_sources(restored_from("store", "fast"), "fast", "store")


@pytest.mark.parametrize(
    ("restored", "output"),
    [
        (None, "restored nothing, although checkpoint 2@1 exists"),
        (
            restored_from("fast", step=1),
            "restored step 1 of attempt 1, not the newest checkpoint, 2@1",
        ),
        (
            restored_from("fast", attempt=2),
            "restored step 2 of attempt 2, not the newest checkpoint, 2@1",
        ),
    ],
)
def test_a_start_that_restored_something_else_is_found(restored: Line | None, output: str) -> None:
    act = Act(began_s=0.0, lines=[{"kind": "ready", "restored": restored, "fingerprint": ""}])
    with pytest.raises(DemoError, match=output):
        story.check_restored(act, CheckpointId(2, 1))


def test_costs_are_added_up_over_both_starts(
    capsys: pytest.CaptureFixture[str], stage: Stage
) -> None:
    act = Act(
        began_s=0.0,
        lines=[
            step_line(1, 2.0),
            {"kind": "captured", "step": 1, "attempt": 1, "bytes": 3_000_000, "blocked_s": 0.02},
            {"kind": "flush_done", "tier": "store", "sources": {"host": 40, "fast": 10}},
            {"kind": "committed", "step": 1, "attempt": 1, "tier": "fast", "bytes": 3_000_000},
            {"kind": "committed", "step": 1, "attempt": 1, "tier": "store", "bytes": 2_000_000},
        ],
    )
    costs = story.sum_up(stage, [act, act])
    assert costs["saves"] == 2
    assert costs["edge_bytes"] == {"host->store": 80, "fast->store": 20}
    assert costs["packed"] == {"store": {"raw_bytes": 6_000_000, "stored_bytes": 4_000_000}}
    output = capsys.readouterr().out
    assert "200 ms of training for 40 ms: 20%" in output
    assert "store packed 5.7 MiB into 3.8 MiB: 1.5 to 1" in output


# The trainer ------------------------------------------------------------------------------------------


def test_trainer_that_ends_badly_is_quoted(tmp_path: Path) -> None:
    with (
        Trainer("it", folder=tmp_path, config=None, steps=-1, small=True) as it,
        pytest.raises(DemoError, match=r"(?s)'it' ended with code 2.*--steps is -1"),
    ):
        list(it.follow())


@pytest.mark.parametrize("taken_by", ["the main thread", "another thread"])
def test_an_interrupt_while_a_trainer_is_started_leaves_none_behind(
    taken_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            if taken_by == "another thread":
                assert other.ident is not None
                signal.pthread_kill(other.ident, signal.SIGINT)
                time.sleep(0.1)  # the handler runs in this thread all the same
            else:
                signal.raise_signal(signal.SIGINT)

    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), kill_leftovers():
            Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True)
    finally:
        over.set()
        other.join()
    assert started[0].returncode == -signal.SIGKILL


def test_a_trainer_that_no_with_holds_yet_is_killed_at_the_end(tmp_path: Path) -> None:
    """An interrupt may come between a trainer's start and the ``with`` that is to end it."""
    with kill_leftovers():
        it = Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True)
    with pytest.raises(ProcessLookupError):
        os.kill(it.pid, 0)


def test_what_a_killed_trainer_wrote_is_read_to_the_last_line(tmp_path: Path) -> None:
    with Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True, pace_s=0.01) as it:
        while len(last_events(tmp_path / "it.jsonl", 4)) < 4:
            time.sleep(0.01)
        first = next(it.follow())
        it.kill()
    assert it.act.was_killed
    assert first == it.act.lines[0]
    assert it.act.lines == last_events(tmp_path / "it.jsonl", 10_000)
    assert len(it.act.lines) >= 4


def test_a_step_shorter_than_its_pace_is_followed_by_a_pause_that_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    training = Training(SMALL, b"abc" * 1000, steps=4)
    steps = train(training, first=1, last=4, ckpt=None, pace_s=600.0)
    seconds = [done.seconds for done in steps]
    assert [0 < own + pause <= 600 for own, pause in zip(seconds, pauses, strict=True)] == [
        True
    ] * 4
    assert min(pauses) > max(seconds)
