"""Several ranks open and restore a run with thousands of checkpoints by a few requests each. No rank plans anything
before all ranks have read the commit records of old checkpoints; what was not read is never deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all, kill_all
from tests.shelf import Shelf
from tests.steps import blank, state_of, step_in, wait_until
from tests.test_many_checkpoints import MANY, multiply
from tierfall.backends import toolkit
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.run import closing, session
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.start import Start

NODES = ("a", "a", "b")
SOON_S = 20.0


class Run:
    """A run of three ranks on two nodes, with a store that all see. ``open`` is another start of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.max_wait = "10s"
        self.blind = ""
        """The node that can read nothing on the store."""

    def config(self, node: str, **rules: Any) -> Config:
        place = self.folder / node
        if self.blind == node:
            rules["options"] = {"blind": "yes"}
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "store", "kind": "object", "url": "shelf://a", **rules},
        ]
        words = {"run": "run", "max_wait": self.max_wait, "chunk": "1MiB"}
        return Config.model_validate({**words, "tiers": tiers})

    def open(self, ranks: list[Ranks], **rules: Any) -> list[Checkpointer]:
        calls = [
            lambda r=r, n=n: Checkpointer(self.config(n, **rules), ranks=r)  # type: ignore[misc]
            for r, n in zip(ranks, NODES, strict=True)
        ]
        opened = on_all(calls)
        assert all(isinstance(one, Checkpointer) for one in opened), opened
        return opened

    def save(self, opened: list[Checkpointer], *steps: int) -> None:
        for step in steps:
            for handle in on_all(
                [lambda c=c, n=step: c.save(n, state_of(n)) for c in opened]  # type: ignore[misc]
            ):
                handle.wait("store", timeout=SOON_S)


@pytest.fixture
def run(tmp_path: Path, shelf: Shelf, impatient: None) -> Run:
    return Run(tmp_path)


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    with network(NODES) as all_three:
        yield all_three


def many(run: Run, shelf: Shelf, count: int) -> None:
    """Save step 1, have it there as ``count`` - 1 steps, and save the last step."""
    with network(NODES) as ranks:
        opened = run.open(ranks)
        on_all([one.begin for one in opened])
        run.save(opened, 1)
        close_all(opened)
    multiply(shelf, "run", count - 1)
    with network(NODES) as ranks:
        opened = run.open(ranks)
        restored(opened)
        run.save(opened, count)
        close_all(opened)


def restored(opened: list[Checkpointer], **words: Any) -> set[int]:
    """Restore on all ranks; return the steps that their states are of: the first step stands for its copies."""
    states = [blank() for _ in opened]
    pairs = zip(opened, states, strict=True)
    reports = on_all([lambda c=c, s=s: c.restore(s, **words) for c, s in pairs])  # type: ignore[misc]
    for report, state in zip(reports, states, strict=True):
        assert report.step == step_in(state) or step_in(state) == 1, reports
    return {report.step for report in reports}


def known(opened: list[Checkpointer]) -> list[list[int]]:
    """Return the steps that each rank knows."""
    found = on_all([one.checkpoints for one in opened])
    return [[info.step for info in each] for each in found]


def test_rank_0_lists_and_reads_checkpoints_for_all_ranks(
    run: Run, shelf: Shelf, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * MANY
    many(run, shelf, count)
    monkeypatch.setattr("tierfall.run.session.AFTER_S", 60.0)  # old records are read once needed
    shelf.clients.clear()
    opened = run.open(ranks)
    assert restored(opened) == {count}
    assert len(shelf.clients) == len(ranks)
    for asked in shelf.clients:  # beside these: the pages of two listings
        assert asked.total() - asked["run/"] <= 15, asked
    assert sorted(asked["run/"] > 0 for asked in shelf.clients) == [False, False, True]
    assert known(opened) == [[*range(1, count + 1)]] * len(ranks)
    assert sorted(asked.total() > count for asked in shelf.clients) == [False, False, True]
    run.save(opened, count + 1)
    assert known(opened) == [[*range(1, count + 2)]] * len(ranks)
    assert [one.checkpoints()[-1].ordinal for one in opened] == [count + 1] * len(ranks)
    close_all(opened)


def test_a_node_that_can_read_nothing_there_learns_what_is_there_and_restores_it(
    run: Run, shelf: Shelf, ranks: list[Ranks]
) -> None:
    many(run, shelf, MANY)
    run.blind = "b"
    opened = run.open(ranks)
    assert restored(opened) == {MANY}
    assert known(opened) == [[*range(1, MANY + 1)]] * len(ranks)
    close_all(opened)


def test_nothing_is_deleted_before_every_record_was_read(
    run: Run, shelf: Shelf, ranks: list[Ranks]
) -> None:
    many(run, shelf, MANY)
    waiting, go = threading.Event(), threading.Event()

    def on_read(key: str) -> None:
        if "step-00000001-" in key:
            waiting.set()
            assert go.wait(60)

    shelf.on_read = on_read
    opened = run.open(ranks, retain={"last": 1})
    assert restored(opened) == {MANY}
    saving = threading.Thread(target=run.save, args=(opened, MANY + 1))
    saving.start()
    assert waiting.wait(SOON_S)
    saving.join(1.0)
    assert saving.is_alive()
    assert shelf.steps() == [*range(1, MANY + 1)]
    go.set()
    saving.join(SOON_S)
    wait_until(lambda: shelf.steps() == [MANY + 1], what="the newest stays")
    wait_until(lambda: known(opened) == [[MANY + 1]] * len(ranks), what="all ranks know it")
    close_all(opened)


def test_a_checkpoint_whose_record_cannot_be_read_stays(
    run: Run, shelf: Shelf, ranks: list[Ranks]
) -> None:
    many(run, shelf, MANY)
    shelf.refused["step-00000007-a0001/commit.json"] = toolkit.UnreachableError
    opened = run.open(ranks, retain={"last": 1})
    assert restored(opened) == {MANY}
    run.save(opened, MANY + 1)
    wait_until(lambda: shelf.steps() == [7, MANY + 1], what="two stay")
    close_all(opened)


def test_what_a_silent_tier_has_stays_and_is_read_by_the_next_start(
    run: Run,
    shelf: Shelf,
    ranks: list[Ranks],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    many(run, shelf, MANY)
    monkeypatch.setattr("tierfall.run.session.AFTER_S", 60.0)
    opened = run.open(ranks, retain={"last": 1})
    assert restored(opened) == {MANY}
    shelf.refused["run/latest"] = toolkit.UnreachableError
    assert known(opened) == [[MANY]] * len(ranks)
    shelf.refused.clear()
    run.save(opened, MANY + 1)
    close_all(opened)
    assert "the commit records of old checkpoints could not be read" in caplog.text
    assert shelf.steps()[:-1] == [*range(1, MANY)]
    with network(NODES) as later:
        opened = run.open(later, retain={"last": 1})
        assert restored(opened) == {MANY + 1}
        run.save(opened, MANY + 2)
        wait_until(lambda: shelf.steps() == [MANY + 2], what="the newest stays")
        close_all(opened)


def test_a_restore_goes_on_with_what_was_not_read(
    run: Run, shelf: Shelf, ranks: list[Ranks]
) -> None:
    """The newest are damaged; then an older one is named."""
    many(run, shelf, MANY)
    for step in (MANY - 1, MANY):
        image = next(key for key in shelf.of_step(step) if "rank-00001" in key and "safe" in key)
        shelf.values[image] = bytes(len(shelf.values[image]))
    opened = run.open(ranks)
    assert restored(opened) == {MANY - 2}
    assert restored(opened, step=5) == {5}
    run.save(opened, 6)
    close_all(opened)
    with network(NODES) as later:
        opened = run.open(later)
        assert restored(opened) == {6}
        live = [info.step for info in opened[2].checkpoints() if not info.abandoned]
        assert live == [1, 2, 3, 4, 5, 6]
        close_all(opened)


@pytest.mark.parametrize(("failed", "max_wait"), [("", "2s"), ("out of memory", "60s")])
def test_close_waits_for_no_rank_that_died_before_it_had_read_every_record(
    run: Run,
    shelf: Shelf,
    ranks: list[Ranks],
    monkeypatch: pytest.MonkeyPatch,
    failed: str,
    max_wait: str,
) -> None:
    """Nor does it wait for longer than FAILED_S at each meeting of the ranks if the training has failed."""
    monkeypatch.setattr(closing, "FAILED_S", 0.5)
    opened, dead = with_one_that_hangs(run, shelf, ranks, monkeypatch, max_wait)
    began_s = time.monotonic()
    errors = on_all([partial(open_run_of(one).close, failed) for one in opened[:2]])
    assert time.monotonic() - began_s < 10.0  # ``open`` would wait for 12 s
    assert ["are not waited for" in str(error) for error in errors] == [True, True], errors
    assert shelf.steps() == [*range(1, MANY + 1)]
    dead.set()
    kill_all(opened[2:])


def test_close_that_is_interrupted_waits_for_no_rank_that_has_not_read_every_record(
    run: Run,
    shelf: Shelf,
    ranks: list[Ranks],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened, dead = with_one_that_hangs(run, shelf, ranks, monkeypatch, "60s")

    def interrupt(*words: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(session.Session, "wait_filled", interrupt)
    began_s = time.monotonic()
    errors = on_all([partial(open_run_of(one).close, "") for one in opened[:2]])
    assert time.monotonic() - began_s < 10.0
    assert [str(error) for error in errors] == ["on purpose"] * 2
    assert "the commit records of earlier checkpoints were not read yet" in caplog.text
    assert "the coordinator stopped" not in caplog.text
    assert shelf.steps() == [*range(1, MANY + 1)]
    dead.set()
    kill_all(opened[2:])


def with_one_that_hangs(
    run: Run, shelf: Shelf, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch, max_wait: str
) -> tuple[list[Checkpointer], threading.Event]:
    """Open a run and restore; the last rank does not read old records before the event is set."""
    many(run, shelf, MANY)
    real, dead = session.agree_on_rest, threading.Event()

    def agree(tiers: OpenedTiers, *words: Any) -> Start:
        if tiers.ranks is ranks[2]:
            assert dead.wait(60)
        return real(tiers, *words)

    monkeypatch.setattr(session, "agree_on_rest", agree)
    run.max_wait = max_wait
    opened = run.open(ranks)
    assert restored(opened) == {MANY}
    return opened, dead
