"""The event log file: whole lines, and never blocks the code that emits an event; the events are those of
docs/metrics.md."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.open_ranks import Opener, close_all
from tests.steps import wait_until
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.telemetry import journal
from tierfall.telemetry.journal import LogFile, LogTail, Subscriber, older_half

MAX_BYTES = 64 << 10


def last_events(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last ``count`` events of a log, oldest first; none if there is no log."""
    return list(deque(LogTail(path).read(), count))


def event(number: int) -> Event:
    return events.TierFailing(at_s=float(number), tier="disk", reason=f"number {number}")


def number_of(line: dict[str, Any]) -> int:
    return int(line["reason"].rpartition(" ")[2])


def numbers(lines: list[dict[str, Any]]) -> list[int]:
    return [number_of(line) for line in lines if line["kind"] == "tier_failing"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "events.jsonl"


@pytest.fixture(autouse=True)
def impatient_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "wall_time", lambda at_s: at_s + 1000)
    monkeypatch.setattr(journal, "FIRST_RETRY_S", 0.005)


class Log(Subscriber):
    """The event log of a run, alone."""

    def __init__(self, path: Path, **words: Any) -> None:
        self.file = LogFile(path, max_bytes=MAX_BYTES)
        super().__init__(
            self.file.write, common={"run": "r", "rank": 0}, what=f"events: {path}", **words
        )
        self.start()

    def close(self, timeout_s: float) -> None:
        self.file.closing.set()
        self.end(timeout_s)


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    made = Log(path)
    yield made
    made.close(5.0)


def write(path: Path, count: int, *, first: int = 0) -> None:
    made = Log(path)
    for number in range(first, first + count):
        made.put(event(number))
    made.close(5.0)
    assert made.lost == 0


# What is written -------------------------------------------------------------------------------------


def test_a_file_that_was_moved_away_is_begun_anew(path: Path, log: Log) -> None:
    log.put(event(1))
    wait_until(path.exists, "the first line")
    wait_until(lambda: path.stat().st_size > 0, "the first line")
    path.rename(path.with_name("moved"))
    log.put(event(2))
    wait_until(path.exists, "a new file")
    wait_until(lambda: numbers(last_events(path, 9)) == [2], "the second line")


# Readers ---------------------------------------------------------------------------------------------


def test_a_line_that_a_kill_has_torn_is_skipped_and_ends_where_the_next_begins(path: Path) -> None:
    write(path, 2)
    with path.open("ab") as file:
        file.write(b'{"format":1,"kind":"tier_fail')
    assert numbers(last_events(path, 9)) == [0, 1]
    write(path, 1, first=2)
    assert numbers(last_events(path, 9)) == [0, 1, 2]
    assert path.read_bytes().count(b"\n") == 4


def test_a_reader_follows_over_every_move_of_the_file(path: Path) -> None:
    tail, file, seen = LogTail(path), LogFile(path, max_bytes=1000), []
    assert tail.read() == []
    for number in range(200):
        line = json.dumps({"kind": "tier_failing", "reason": f"number {number}"}).encode() + b"\n"
        file.append(line)
        if number % 3 == 0:  # less often than a part is full, so none is missed
            seen += numbers(tail.read())
    seen += numbers(tail.read())
    assert older_half(path).exists()
    assert seen == list(range(200))


@pytest.mark.parametrize(
    "line", [b"[1]\n", b'"kind"\n', b'{"kind":3}\n', b"\xff\n", b"[" * 9999 + b"\n"]
)
def test_what_is_no_event_is_skipped(path: Path, line: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(line + b'{"kind":"tier_failing","reason":"number 1"}\n')
    assert numbers(last_events(path, 9)) == [1]


# A disk that does not take it ------------------------------------------------------------------------


class Disk:
    """Stands between the log and its disk: it may be full, or hang."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._write = os.write
        patch.setattr(journal.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        self.goes_on.wait(30)
        if self.room is None:
            return self._write(fd, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._write(fd, data[: self.room])
        self.room -= done
        return done


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_full_disk_loses_nothing_where_it_has_room_again_in_time(
    path: Path, disk: Disk, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    disk.room = 250  # in the midst of the second or third line
    with caplog.at_level(logging.WARNING, "tierfall"):
        for number in range(20):
            log.put(event(number))
        wait_until(lambda: bool(caplog.records), "it is said")
        disk.room = None
        wait_until(lambda: numbers(last_events(path, 99)) == list(range(20)), "all are there")
        wait_until(lambda: len(caplog.records) == 2, "its end is said")
    assert log.lost == 0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[1].endswith("is written again")
    assert "No space left on device" in caplog.text or "less than a line" in caplog.text
    assert "training continues" in caplog.text


def test_what_a_full_disk_has_lost_is_counted_and_the_log_says_so(path: Path, disk: Disk) -> None:
    disk.room = 0
    log = Log(path, waiting_max=10)
    log.put(event(0))
    wait_until(path.exists, "the first one is with the disk")
    for number in range(1, 15):
        log.put(event(number))
    count = log.lost
    assert count == 4, "ten wait"
    disk.room = None
    wait_until(lambda: len(last_events(path, 99)) == 16 - count, "all that waited is there")
    *waited, lost = last_events(path, 99)
    assert numbers(waited) == list(range(15 - count))
    assert (lost["kind"], lost["count"]) == ("events_lost", count)
    log.close(5.0)
    assert log.lost == count


def test_a_disk_that_hangs_holds_up_neither_events_nor_close(path: Path, disk: Disk) -> None:
    disk.goes_on.clear()
    log = Log(path, waiting_max=10)
    for number in range(100):
        log.put(event(number))
    assert log.lost >= 89, "ten wait, and one may be with the disk"
    log.close(0.05)
    disk.goes_on.set()


# The events of a run --------------------------------------------------------------------------------


PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def only(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in last_events(path, 10_000) if event["kind"] == kind]


# The page --------------------------------------------------------------------------------------------


KINDS = [
    value
    for value in vars(events).values()
    if isinstance(value, type) and issubclass(value, events.Event) and value.kind
]


def members_of(kind: type[events.Event]) -> tuple[str, ...]:
    """The members of a line of this kind, without ``kind``."""
    own = (each.name for each in fields(kind) if each.name != "at_s")
    return tuple(n for name in own for n in (("step", "attempt") if name == "id" else (name,)))


def documented() -> dict[str, tuple[str, ...]]:
    """The table of kinds: the members of each."""
    table = PAGE.read_text().partition("\n### Kinds\n")[2].partition("|---|")[2]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", table, flags=re.MULTILINE)
    return {kind: tuple(re.findall(r"`(\w+)`", names)) for kind, names in rows}


def test_the_page_lists_every_kind_with_its_members() -> None:
    assert len(documented()) == len(KINDS)
    assert documented() == {kind.kind: members_of(kind) for kind in KINDS}


# Several ranks ---------------------------------------------------------------------------------------


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


@pytest.mark.parametrize(
    ("name", "files"),
    [("events.jsonl", ["events.jsonl"]), ("e-{rank}.jsonl", ["e-0.jsonl", "e-1.jsonl"])],
)
def test_rank_0_writes_for_all_or_each_rank_a_file_of_its_own(
    opener: Opener, tmp_path: Path, name: str, files: list[str]
) -> None:
    both = opener.all_open(events=str(tmp_path / "logs" / name))
    handles = [
        ckpt.save(1, {"w": torch.full((4,), float(rank)), "rng": None})
        for rank, ckpt in enumerate(both)
    ]
    for handle in handles:
        handle.wait(timeout=20)
    close_all(both)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in logs] == files
    for rank, path in enumerate(logs):
        assert {e["rank"] for e in last_events(path, 99)} == {rank}
        assert {e["world_size"] for e in only(path, "opened")} == {2}
        for kind in ("save_begun", "captured"):
            assert [e["step"] for e in only(path, kind)] == [1], kind
        assert sorted(e["tier"] for e in only(path, "committed")) == ["far", "nvme"]
