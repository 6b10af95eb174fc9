"""The demo's parts, each alone: its chain, its events, its trainer process, and the checks behind what it says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import tierfall
from tests.steps import state_of, step_in
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.errors import ConfigError
from tierfall.demo import chain as chains
from tierfall.demo import damage, ending, trainer
from tierfall.demo.events import (
    Ended,
    Event,
    EventReader,
    EventWriter,
    Looked,
    Packed,
    Restored,
    Saved,
    Started,
    StepDone,
    TierNow,
    Totals,
)
from tierfall.demo.process import DemoError, Trainer, none_left
from tierfall.demo.screen import Screen
from tierfall.demo.stage import Act, Stage, check_restored
from tierfall.demo.training import SMALL, Training, train


def step_done(step: int, loss: float, totals: Totals | None = None) -> StepDone:
    return StepDone(step=step, loss=loss.hex(), seconds=0.1, time_s=1.0, tiers={}, totals=totals)


def restored_from(*tiers: str, step: int = 2, attempt: int = 1) -> Restored:
    return Restored(
        step=step,
        attempt=attempt,
        seconds=0.5,
        time_s=3.0,
        sources=tuple(("shard", tier, 7) for tier in tiers),
        fallbacks=(),
    )


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


def stage_of(chain: chains.Chain) -> Stage:
    return Stage(screen=Screen(chains.TIERS), chain=chain, steps=12, every=1, small=True)


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


def test_flipped_byte_is_another_one_and_the_only_one(tmp_path: Path) -> None:
    shard = tmp_path / "fast/demo/step-00000003-a0001/rank-00000-of-00001.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(range(9)))
    chain = chains.Chain(folder=tmp_path, memory=tmp_path, config_path=tmp_path)
    path, offset = chains.flip_byte(chain, "fast", chains.parse_checkpoint("3@1"))
    differing = [i for i, value in enumerate(shard.read_bytes()) if value != i]
    assert (path, [offset]) == (shard, differing)


def test_a_copy_is_cut_off_where_bytes_lie_and_no_commit_record(chain: chains.Chain) -> None:
    id = chains.parse_checkpoint("2@1")
    assert not chains.is_cut_off(chain, "store", id)
    (chain.folder / "store/demo/step-00000002-a0001/commit.json").unlink()
    assert chains.is_cut_off(chain, "store", id)
    assert not chains.is_cut_off(chain, "store", chains.parse_checkpoint("4@1"))


def test_a_lost_node_leaves_the_object_tier_alone(chain: chains.Chain) -> None:
    assert damage.lose_node(stage_of(chain)) == chains.parse_checkpoint("2@1")
    assert not chain.memory.exists()
    assert not (chain.folder / "fast").exists()
    assert step_in(tierfall.load(chain.folder / "store")) == 2


@pytest.mark.parametrize(
    ("folder", "found"), [("fast", "fast, store"), ("store", "fast"), (None, "fast, store")]
)
def test_a_node_that_is_not_lost_or_lost_with_the_store_is_found(
    folder: str | None, found: str, chain: chains.Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(chain: chains.Chain) -> None:
        if folder == "fast":
            shutil.rmtree(chain.memory)
        elif folder == "store":
            shutil.rmtree(chain.folder / "store")

    monkeypatch.setattr(chains, "lose_node", lose)
    with pytest.raises(DemoError, match=rf"only store should hold .* found some on: {found}$"):
        damage.lose_node(stage_of(chain))


# What acts check --------------------------------------------------------------------------------------


def test_one_loss_that_differs_in_its_last_bit_is_found() -> None:
    steps = [step_done(1, 2.5), step_done(2, 2.25)]
    expected = {1: (2.5).hex(), 2: (2.25).hex()}
    assert ending.check_equal(steps, expected, "after") == 2
    expected[2] = (2.2500000000000004).hex()
    with pytest.raises(DemoError, match=r"the loss of step 2, after, is 0x1\.2"):
        ending.check_equal(steps, expected, "after")


def test_a_restore_from_another_tier_than_expected_is_found() -> None:
    damage.check_came_from(restored_from("store"), {"store"})
    for tiers in (("host",), ("store", "fast")):
        with pytest.raises(DemoError, match="expected store alone"):
            damage.check_came_from(restored_from(*tiers), {"store"})


def test_a_restore_that_did_not_fall_is_found() -> None:
    with pytest.raises(DemoError, match="was restored from fast; expected what is damaged"):
        damage.check_fell(restored_from("fast"))
    with pytest.raises(DemoError, match="and the reason"):
        damage.check_fell(restored_from("fast", "store"))


@pytest.mark.parametrize(
    ("restored", "said"),
    [
        (None, "restored nothing, though checkpoint 2@1 was there"),
        (restored_from("fast", step=1), "restored step 1 of attempt 1, not 2@1"),
        (restored_from("fast", attempt=2), "restored step 2 of attempt 2, not 2@1"),
    ],
)
def test_a_start_that_restored_something_else_is_found(
    restored: Restored | None, said: str
) -> None:
    act = Act(began_s=0.0)
    act.add(Started(parameters=1, restored=restored, fingerprint=""))
    with pytest.raises(DemoError, match=said):
        check_restored(act, chains.parse_checkpoint("2@1"))


def test_costs_are_added_up_over_both_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(**packed: Packed) -> Act:
        act = Act(began_s=0.0)
        totals = Totals(
            saves=2, blocked_s=0.01, image_bytes=100, edge_bytes={"host->store": 50}, packed=packed
        )
        act.add(step_done(1, 2.0, totals))
        return act

    one = Packed(raw_bytes=3_000_000, stored_bytes=2_000_000, seconds=0.01)
    none = Packed(raw_bytes=0, stored_bytes=0, seconds=0.0)
    chain = chains.Chain(folder=tmp_path, memory=tmp_path, config_path=tmp_path)
    costs = ending.sum_up(stage_of(chain), [act(store=one), act(store=one, other=none)])
    assert costs["saves"] == 4
    assert costs["edge_bytes"] == {"host->store": 100}
    assert costs["packed"] == {
        "store": {"raw_bytes": 6_000_000, "stored_bytes": 4_000_000, "seconds": 0.02}
    }
    said = capsys.readouterr().out
    assert "200 ms of training for 20 ms: 10%" in said
    assert "store packed 5.7 MiB into 3.8 MiB: 1.5 to 1, 300 MB/s a thread" in said


# Events -----------------------------------------------------------------------------------------------

TIERS = {"store": TierNow(whole=("1@1",), arriving="2@1", arrived_bytes=5, moved_bytes=9)}
TOTALS = Totals(
    saves=1,
    blocked_s=0.5,
    image_bytes=9,
    edge_bytes={"host->store": 9},
    packed={"store": Packed(raw_bytes=9, stored_bytes=8, seconds=0.25)},
)
EVENTS: list[Event] = [
    Looked(time_s=1.5, tiers=TIERS),
    Started(parameters=3, restored=None, fingerprint="x"),
    Started(parameters=3, restored=restored_from("host", "fast"), fingerprint="x"),
    Saved(checkpoint="2@1", began_s=2.0, captured_s=None, durable_s={"fast": 0.5}),
    StepDone(step=1, loss=(0.5).hex(), seconds=0.1, time_s=1.0, tiers=TIERS, totals=TOTALS),
    step_done(2, 0.25),
    Ended(fingerprint="y", time_s=9.0, tiers=TIERS, totals=TOTALS),
]


def test_every_event_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        for event in EVENTS:
            writer.write(event)
    assert EventReader(tmp_path / "events").read() == EVENTS


def test_event_reader_leaves_half_a_line_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with EventWriter(path) as writer:
        for event in EVENTS:
            writer.write(event)
    written = path.read_bytes()
    path.write_bytes(written[:-5])
    reader = EventReader(path)
    assert reader.read() == EVENTS[:-1]
    path.write_bytes(written)
    assert reader.read() == EVENTS[-1:]
    assert reader.read() == []


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
        with pytest.raises(KeyboardInterrupt), none_left():
            Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True)
    finally:
        over.set()
        other.join()
    assert started[0].returncode == -signal.SIGKILL


def test_a_trainer_that_no_with_holds_yet_is_killed_at_the_end(tmp_path: Path) -> None:
    """An interrupt may come between a trainer's start and the ``with`` that is to end it."""
    with none_left():
        it = Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True)
    with pytest.raises(ProcessLookupError):
        os.kill(it.pid, 0)


def test_what_a_killed_trainer_wrote_is_told_to_the_last_line(tmp_path: Path) -> None:
    with Trainer("it", folder=tmp_path, config=None, steps=10_000, small=True, pace_s=0.01) as it:
        while len(it_wrote(tmp_path)) < 4:
            time.sleep(0.01)
        first = next(it.follow())
        rest = it.kill()
    assert [first, *rest] == it_wrote(tmp_path)
    assert len(rest) >= 3


def it_wrote(folder: Path) -> list[Event]:
    return EventReader(folder / "it.jsonl").read()


def test_a_step_shorter_than_its_pace_is_followed_by_a_pause_that_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds: list[float] = []
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    train(
        Training(SMALL, b"abc" * 1000, steps=4),
        first=1,
        last=4,
        ckpt=None,
        told=lambda done: seconds.append(done.seconds),
        pace_s=600.0,
    )
    assert [0 < own + pause <= 600 for own, pause in zip(seconds, pauses, strict=True)] == [
        True
    ] * 4
    assert min(pauses) > max(seconds)


def test_saves_are_told_when_they_come_further_and_no_more_when_they_are_done(
    tmp_path: Path,
) -> None:
    times = iter([10.0, 10.5, 12.0, 15.0])
    id = chains.parse_checkpoint("4@1")
    handle = SaveHandle(id, ("fast", "store"), in_memory="host", clock=lambda: next(times))
    told: list[list[Event]] = []
    with EventWriter(tmp_path / "events") as log:
        reader = EventReader(tmp_path / "events")
        saves = trainer.Saves(log)
        saves.add(handle, began_s=7.0)
        told.append(reader.read())
        for come_further in (
            lambda: None,
            handle.tell_captured,
            lambda: handle.tell_committed("store"),
            lambda: handle.tell_committed("fast"),
            lambda: None,
        ):
            come_further()
            saves.tell()
            told.append(reader.read())

    def so_far(captured_s: float | None, **durable_s: float) -> list[Event]:
        return [Saved(checkpoint="4@1", began_s=7.0, captured_s=captured_s, durable_s=durable_s)]

    assert told == [
        so_far(None),
        [],
        so_far(0.5),
        so_far(0.5, store=2.0),
        so_far(0.5, store=2.0, fast=5.0),
        [],
    ]


LEFT = ((1, 1, "store"),)
FURTHER = {"store": replace(TIERS["store"], arrived_bytes=6, moved_bytes=10)}
WHOLE = {"store": TierNow(whole=("1@1", "2@1"), arriving=None, arrived_bytes=0, moved_bytes=14)}


@pytest.mark.parametrize(
    ("looks", "drains"),
    [
        ([TIERS, FURTHER, WHOLE], [LEFT, LEFT, ()]),
        ([TIERS, TIERS, WHOLE], [LEFT, LEFT, ()]),  # nothing was seen to come, and it came
        ([TIERS, TIERS, TIERS], [LEFT, LEFT, LEFT]),
    ],
)
def test_drain_looks_time_and_again_but_does_not_wait_for_a_tier_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Any], drains: list[Any]
) -> None:
    """A drain with a deadline returns early also where a copy would only come after it."""

    class Ckpt:
        deadlines_s: ClassVar[list[float | None]] = []

        def drain(self, deadline: float | None) -> tierfall.DrainReport:
            left = drains[len(self.deadlines_s)]
            self.deadlines_s.append(deadline)
            return tierfall.DrainReport(done=(), left=left, seconds=0.0)

    Ckpt.deadlines_s.clear()
    pending = list(looks)
    monkeypatch.setattr(trainer, "look", lambda ckpt: (pending.pop(0), None))
    ckpt: Any = Ckpt()
    with EventWriter(tmp_path / "events") as log:
        trainer.drain(ckpt, log)
    forever = looks[0] == looks[1]
    assert Ckpt.deadlines_s == [trainer.LOOK_S] * 2 + [None if forever else trainer.LOOK_S]
    told = EventReader(tmp_path / "events").read()
    assert [event.tiers for event in told if isinstance(event, Looked)] == looks
