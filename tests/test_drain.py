"""Drain towards a deadline, by a call and by a signal: the forecast matches what is flushed."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tierfall
from tests import forked
from tests.core.ranks.threads import on_all
from tests.forked import Forked
from tests.open_ranks import Opener, close_all, wait_sealed
from tests.steps import state_of, steps_on, wait_until
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import LossClass, SaveOutcome
from tierfall.run import group_commands
from tierfall.run.drain_on_signal import DrainOnSignal

MakeConfig = Callable[..., dict[str, Any]]
SOON_S = 20.0
ELEMENTS = 200_000
"""An image of 0.86 MB: a second at 860 kB/s."""


def large(step: int) -> dict[str, Any]:
    return state_of(step, elements=ELEMENTS)


def begun(ckpt: tierfall.Checkpointer, share: float) -> bool:
    """Say whether every tier has so much of the copy that it is at, and no more than most of it."""
    actives = [lane.active for lane in ckpt._session.coordinator.lanes.values()]
    return all(a is not None and a.done_bytes >= share * 4 * ELEMENTS for a in actives)


def test_the_forecast_is_within_a_fifth_of_what_became_durable(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(
        a={"bandwidth": "2500kB/s"},
        b={"bandwidth": "900kB/s"},
        c={"bandwidth": "600kB/s"},
        host={"capacity": "16MiB"},
    )
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1))
        assert ckpt.drain().forecast == ()  # nothing is foretold without a deadline
        for step in range(2, 8):
            ckpt.save(step, large(step)).captured()
        wait_until(lambda: begun(ckpt, 0.4), "three copies are half done")
        with caplog.at_level(logging.WARNING, logger="tierfall"):
            report = ckpt.drain(deadline=3.0)
        assert report.seconds < 3.5
        sizes = {(f.step, f.attempt, f.tier): f.left_bytes for f in report.forecast}
        assert len([size for size in sizes.values() if size < 4 * ELEMENTS]) == 3, "half done"
        foretold = sum(f.left_bytes for f in report.forecast if f.arrives)
        came = sum(sizes[copy] for copy in report.done)
        assert came > 0
        assert abs(foretold - came) <= 0.2 * came, (foretold, came, report)
        late = {(f.step, f.tier) for f in report.forecast if not f.arrives}
        assert late
        assert "drain: in at most 3 s step 7@1 will be on" in caplog.text
        assert " carry " in caplog.text
        newest = {tier: max(s for s, _, t in report.done if t == tier) for tier in "abc"}
        assert newest["a"] == newest["b"] == 7, "the newest came before what was older"


def test_the_seconds_of_a_report_are_those_of_the_whole_call(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those in which it learns what another process has committed for this start."""
    with tierfall.open(make_config()) as ckpt:
        real = ckpt._session.find_external_commits

        def look(*args: Any, **words: Any) -> None:
            time.sleep(0.2)
            real(*args, **words)

        monkeypatch.setattr(ckpt._session, "find_external_commits", look)
        for deadline in (None, 0.1):
            began = time.monotonic()
            seconds = ckpt.drain(deadline).seconds
            assert 0.2 <= seconds <= time.monotonic() - began


def test_a_close_brings_the_newest_first_and_the_rest_stays_in_memory(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"}, max_wait="3s")
    ckpt = tierfall.open(config)
    ckpt.save(1, large(1)).wait()
    for step in range(2, 9):
        ckpt.save(step, large(step)).captured()
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 4.5
    assert 8 in steps_on(tmp_path / "disk")
    assert len(steps_on(tmp_path / "disk")) < 8
    with tierfall.open({**config, "max_wait": "30s"}) as ckpt:
        report = ckpt.restore(large(0))
        assert report is not None
        assert (report.step, report.sources[0].tier) == (8, "host")


# Signals ---------------------------------------------------------------------------------------------

TRAINER = """
import hashlib, logging, signal, sys, time
import torch, yaml, tierfall
from tests.steps import state_of
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
config = yaml.safe_load(open(sys.argv[1]))
handler = "handler" in sys.argv
if handler:
    emit = logging.root.handlers[0].emit
    # As a terminal at the other end of a slow line.
    logging.root.handlers[0].emit = lambda record: (time.sleep(0.1), emit(record))
class Ended(Exception): pass
def end(number, frame):
    raise Ended
if handler:
    signal.signal(signal.SIGTERM, end)
with tierfall.open(config) as ckpt:
    ckpt.save(1, state_of(1, elements=200_000)).wait()
    ckpt.save(2, state_of(2, elements=200_000)).captured()
    print("saved", flush=True)
    try:
        if handler:
            time.sleep(60)
        else:
            hashlib.pbkdf2_hmac("sha512", b"", b"", 30_000_000)  # in C, as a long step
        print("was not told", flush=True)
    except Ended:
        print("the handler ran", flush=True)
print("closed", flush=True)
"""


def trainer(tmp_path: Path, config: dict[str, Any], *words: str) -> Forked:
    path = tmp_path / "drained.yaml"
    path.write_text(yaml.safe_dump(config))
    return forked.start(["-c", TRAINER, str(path), *words])


def told_to_end(process: Forked) -> str:
    """Send SIGTERM once the trainer has saved; return all it wrote."""
    messages = ""
    while line := process.stdout.readline().decode():
        messages += line
        if line == "saved\n":
            process.send_signal(signal.SIGTERM)
    process.wait(60)
    return messages


def test_sigterm_drains_while_training_is_in_c_and_then_ends_the_process(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"})
    config["drain"] = {"deadline": "20s"}
    with trainer(tmp_path, config) as process:
        messages = told_to_end(process)
    assert process.returncode == -signal.SIGTERM, messages
    assert "SIGTERM: draining for 20 s at most" in messages
    assert re.search(r"SIGTERM: in at most (20|19\.\d) s step 2@1 will be on disk\n", messages)
    assert "SIGTERM: drained\n" in messages
    newest = "its newest checkpoint is 2@1, on disk; a restart continues there"
    assert messages.endswith(f"SIGTERM: run run may end now; {newest}\n")
    assert "was not told" not in messages
    assert steps_on(tmp_path / "disk") == [1, 2]


def test_what_a_deadline_does_not_carry_is_reported_and_stays_in_memory(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"bandwidth": "300kB/s"}, host={"capacity": "16MiB"})
    config["drain"] = {"deadline": "1s"}
    with trainer(tmp_path, config) as process:
        messages = told_to_end(process)
    assert process.returncode == -signal.SIGTERM, messages
    assert re.search(
        r"SIGTERM: in at most \d+ m?s step 2@1 will not be on disk: .* carry ", messages
    )
    assert "SIGTERM: drained; still owed: 2@1 to disk" in messages
    assert steps_on(tmp_path / "disk") == [1]
    config.pop("drain")
    config["tiers"][1]["bandwidth"] = "100MB/s"
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(large(0))
        assert report is not None
        assert report.step == 2


def test_a_handler_of_the_users_runs_after_the_drain_and_the_run_is_closed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"})
    config["drain"] = {}
    with trainer(tmp_path, config, "handler") as process:
        messages = told_to_end(process)
    assert process.returncode == 0, messages
    assert (
        messages.index("SIGTERM: drained")
        < messages.index("the handler ran")
        < messages.index("closed")
    )
    assert steps_on(tmp_path / "disk") == [1, 2]


def test_signals_are_let_go_of_at_the_close_and_may_be_listened_to_again(
    make_config: MakeConfig,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    config = make_config()
    config["drain"] = {"on_signal": ["SIGUSR1"]}
    for _ in range(2):
        with tierfall.open(config, fresh=True) as ckpt:
            assert signal.getsignal(signal.SIGUSR1) is not before
            ckpt.save(1, state_of(1))
        assert signal.getsignal(signal.SIGUSR1) is before


@pytest.fixture
def called(make_config: MakeConfig) -> Iterator[threading.Event]:
    """Set by the user's handler, which a drain on SIGUSR1 lets run once it is over."""
    called = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.set())
    yield called
    signal.signal(signal.SIGUSR1, before)


def saving_on_signal(config: dict[str, Any]) -> dict[str, Any]:
    """One signal asks for a save and for a drain, whose deadline no test waits for."""
    config["interval"] = {"every": 10**6, "on_signal": ["SIGUSR1"]}
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "10m"}
    return config


def test_a_save_that_the_signal_asks_for_is_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    """One signal asks for a save at the next step, and for a drain, which takes that save along."""
    with tierfall.open(saving_on_signal(make_config())) as ckpt:
        ckpt.save(1, state_of(1))
        assert ckpt.maybe_save(2, state_of(2)) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not called.wait(0.5), "it was over before the save"
        handle = ckpt.maybe_save(3, state_of(3))
        assert handle is not None
        wait_until(called.is_set, "the drain is over")
        assert handle.done("disk")


def test_a_save_that_the_signal_asks_for_may_come_before_the_drain_has_begun(
    make_config: MakeConfig, called: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, drain = threading.Event(), DrainOnSignal._drain

    def drain_late(self: DrainOnSignal, number: signal.Signals) -> None:
        assert saved.wait(SOON_S)
        drain(self, number)

    monkeypatch.setattr(DrainOnSignal, "_drain", drain_late)
    with tierfall.open(saving_on_signal(make_config())) as ckpt:
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = ckpt.maybe_save(1, state_of(1))
        assert handle is not None
        saved.set()
        wait_until(called.is_set, "the drain is over")
        assert handle.done("disk")


def test_a_save_that_the_signal_asks_for_and_that_is_skipped_is_not_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    host = {"capacity": "1200KiB", "when_full": "skip"}
    config = make_config(disk={"bandwidth": "900kB/s"}, host=host)
    with tierfall.open(saving_on_signal(config)) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = ckpt.maybe_save(2, large(2))
        assert handle is not None
        assert handle.outcome is SaveOutcome.SKIPPED
        wait_until(called.is_set, "the drain is over")
        assert steps_on(Path(config["tiers"][-1]["path"])) == [1]


def test_a_drain_that_waits_for_a_save_ends_with_the_close(
    make_config: MakeConfig, called: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = threading.Event(), DrainOnSignal._wait_for_save

    def wait_for_save(self: DrainOnSignal, *args: Any) -> bool:
        waits.set()
        return wait(self, *args)

    monkeypatch.setattr(DrainOnSignal, "_wait_for_save", wait_for_save)
    with tierfall.open(saving_on_signal(make_config())):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert waits.wait(SOON_S)
    wait_until(called.is_set, "the drain is over")


def test_off_the_main_thread_open_refuses_and_leaves_nothing_behind(
    make_config: MakeConfig,
) -> None:
    config = make_config()
    caught: list[BaseException] = []

    def refused() -> None:
        with pytest.raises(ConfigError, match=r"drain\.on_signal: only the main thread") as error:
            tierfall.open({**config, "drain": {}})
        caught.append(error.value)

    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    assert len(caught) == 1
    tierfall.open(config).close()


def test_a_drain_that_meets_a_close_lets_it_end(
    make_config: MakeConfig, called: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"}, max_wait="20s")
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "20s"}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(called.is_set, "the handler was called after the close")
    assert "what was to be done on SIGUSR1 failed" not in caplog.text


# Several ranks ---------------------------------------------------------------------------------------


def slow_ranks(
    tmp_path: Path, ranks: list[Ranks], waiting: Sequence[int] = (1, 1, 1, 1)
) -> list[Any]:
    """Both ranks of a run whose tier has shown that an image takes a second, with images that wait, each so many
    times as large."""
    opener = Opener(tmp_path, ranks)
    checkpointers = on_all(
        [
            lambda r=r: opener.open(  # type: ignore[misc]
                r,
                tiers=[
                    {
                        "name": "host",
                        "kind": "host",
                        "folder": str(tmp_path / str(r) / "memory"),
                        "capacity": "16MiB",
                    },
                    {
                        "name": "nvme",
                        "kind": "file",
                        "path": str(tmp_path / str(r) / "nvme"),
                        "bandwidth": "900kB/s",
                    },
                ],
                chunk="64KiB",
                max_wait="30s",
            )
            for r in range(2)
        ]
    )

    def save(rank: int, step: int, times: int = 1) -> Any:
        tensor = torch.full((times * ELEMENTS,), float(rank))
        return checkpointers[rank].save(step, {"w": tensor, "rng": None})

    on_all([lambda r=r: save(r, 1).wait() for r in range(2)])  # type: ignore[misc]
    for step, times in enumerate(waiting, start=2):
        on_all([lambda r=r, s=step, n=times: save(r, s, n).captured() for r in range(2)])  # type: ignore[misc]
        wait_sealed(checkpointers)
    return checkpointers


def test_rank_0_plans_for_all_and_the_report_is_the_same_on_all(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    checkpointers = slow_ranks(tmp_path, ranks)
    reports = on_all([lambda c=c: c.drain(3.2) for c in checkpointers])  # type: ignore[misc]
    assert reports[0].forecast == reports[1].forecast != ()
    assert (reports[0].done, reports[0].left) == (reports[1].done, reports[1].left)
    assert [f.arrives for f in reports[0].forecast].count(False) >= 1
    assert 5 in {step for step, _, _ in reports[0].done}, "the newest came before older ones"
    assert reports[0].left
    close_all(checkpointers)


def test_a_rank_that_knows_what_cannot_arrive_has_patience_with_one_that_waits_for_it(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointers = slow_ranks(tmp_path, ranks, waiting=(1, 6))
    monkeypatch.setattr(group_commands, "_patience_s", lambda session: 0.5)
    reports = on_all([lambda c=c: c.drain(4.0) for c in checkpointers])  # type: ignore[misc]
    monkeypatch.undo()
    assert [report.left for report in reports] == [((3, 1, "nvme"),)] * 2, reports
    close_all(checkpointers)


def test_a_deadline_of_any_rank_is_one_for_all(tmp_path: Path, ranks: list[Ranks]) -> None:
    checkpointers = slow_ranks(tmp_path, ranks)
    coordinators = [c._session.coordinator for c in checkpointers]
    checkpointers[1]._session.call_soon(lambda: coordinators[1].share_deadline(3.0))
    wait_until(lambda: coordinators[0].drain_schedule.active, "rank 0 has heard of it")
    assert not coordinators[1].drain_schedule.active, "rank 0 alone plans"
    wait_until(lambda: not coordinators[0].drain_schedule.active, "the deadline is over")
    checkpoints = checkpointers[0].checkpoints()
    assert checkpoints[-1].tiers["nvme"] == "committed", "the newest came first"
    close_all(checkpointers)


# The loss bound --------------------------------------------------------------------------------------


def test_statistics_say_what_a_failure_would_cost_now(make_config: MakeConfig) -> None:
    config = make_config(near={}, far={"shared": True, "flush": {"every": 2}})
    config["interval"] = {"every": 10}
    with tierfall.open(config) as ckpt:
        nothing = ckpt.statistics().loss_bound[LossClass.PROCESS]
        assert (nothing.survives, nothing.tier, nothing.steps_lost) == (None, None, None)
        for step in range(1, 36):
            ckpt.maybe_save(step, state_of(step))
            time.sleep(0.002)
        ckpt.drain()
        ckpt.maybe_save(36, state_of(36))
        bounds = ckpt.statistics().loss_bound
        process, node, site = (bounds[lost] for lost in LossClass if lost is not LossClass.NONE)
        assert process.survives is not None
        assert node.survives is not None
        assert (process.survives.step, process.tier, process.steps_lost) == (30, "host", 6)
        assert (node.survives.step, node.tier, node.steps_lost) == (20, "far", 16)
        assert site.survives is None
        assert node.seconds_lost is not None
        assert node.seconds_lost > 16 * 0.002
        assert node.restore_s is None, "nothing was read yet"
        assert ckpt.restore(state_of(0), step=20, tier="far") is not None
        node = ckpt.statistics().loss_bound[LossClass.NODE]
        assert node.steps_lost == 0, "training is back at step 20"
        assert node.seconds_lost is None
        assert node.restore_s is not None
        assert 0 < node.restore_s < 5
