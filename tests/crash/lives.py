"""One run's life, killed again and again, and what must be true of what each death leaves behind.

The oracle is the journal of the dead and plain reading: folders, JSON, the safetensors library. tierfall itself is
asked as well, and must come to the same answer.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from safetensors.torch import load, load_file

import tierfall
from tests.crash import doomed
from tests.forked import Forked, server_of

PATIENCE_S = 60.0
TRAINER = Path(__file__).with_name("trainer.py")
ENTRIES_MAX = 2000
TIERS = ("nvme", "slow")
FOREIGN = "belongs-to-somebody-else.txt"
_STEP = re.compile(r"step-([0-9]{8})-a([0-9]{4})\Z")
_IMAGE = "rank-00000-of-00001.safetensors"
_RECORDS = {"commit.json", "rank-00000-of-00001.json"}
_OURS = {
    "nvme": _RECORDS | {_IMAGE},
    "slow": _RECORDS | {f"{_IMAGE}.zst", "rank-00000-of-00001.stored.json"},
}

Entry = dict[str, Any]
Who = tuple[int, int]  # (step, start)


class Journal:
    """The reading end of a trainer's journal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._unread: deque[bytes] = deque()

    def entries(self, *, until_s: float | None = None) -> Iterator[Entry]:
        """Yield what is told, until the trainer is gone or, with ``until_s``, that moment has come."""
        while True:
            while self._unread:  # whoever stopped listening left some
                yield json.loads(self._unread.popleft())
            left = PATIENCE_S if until_s is None else max(0.0, until_s - time.monotonic())
            ready, _, _ = select.select([self._descriptor], [], [], left)
            if not ready:
                assert until_s is not None, "the trainer has told nothing for a minute"
                return
            data = os.read(self._descriptor, 65536)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._unread.extend(lines)


@dataclass(slots=True)
class OnTier:
    """What one tier holds by plain reading: who is committed, by folder, and what else lies there."""

    committed: dict[Who, Path] = field(default_factory=dict)
    uncommitted: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)

    @property
    def newest(self) -> Who | None:
        return max(self.committed, default=None)


def read_image(folder: Path) -> dict[str, Any]:
    """Read an image with plain tools, packed or not."""
    packed = folder / f"{_IMAGE}.zst"
    if not packed.exists():
        return load_file(folder / _IMAGE)
    with packed.open("rb") as file:
        unpacker = zstandard.ZstdDecompressor()
        return load(unpacker.stream_reader(file, read_across_frames=True).readall())


def read_tier(root: Path) -> OnTier:
    """Look at a tier without tierfall; every committed checkpoint is compared bit for bit."""
    found = OnTier()
    run = root / doomed.RUN
    for path in sorted(run.iterdir()) if run.is_dir() else ():
        step = _STEP.match(path.name)
        if step is None:
            found.others.append(path)
        elif not (path / "commit.json").exists():
            found.uncommitted.append(path)
        else:
            tensors = read_image(path)
            start, saved = tensors["who"].tolist()
            assert saved == int(step[1]), f"{path} holds step {saved}"
            assert doomed.difference(tensors, start, saved) is None, path
            found.committed[saved, start] = path
    return found


class Life:
    """Starts one run, kills it, and checks. ``seed`` decides all that is left to chance but the clock."""

    def __init__(
        self,
        folder: Path,
        memory: Path,
        seed: int,
        *,
        when_full: str = "wait",
    ) -> None:
        self._when_full = when_full
        self.folder = folder
        self.memory = memory
        self.random = random.Random(seed)
        print(f"a life of seed {seed}")
        self.starts = 0
        self.begun: set[Who] = set()
        self.told: dict[str, set[Who]] = {"host": set(), "nvme": set(), "slow": set()}
        self.superseded: set[Who] = set()
        self._before: set[Who] = set()
        self._foreign: list[Path] = []

    # Killing ---------------------------------------------------------------------------------------

    def stop_and_kill(self, name: str) -> None:
        """Kill a start that stands still at a point; training goes on until it comes there."""
        call = self.random.randint(*doomed.POINTS[name].calls)
        print(f"start {self.starts}: killed at {name}, call {call}")
        self._kill(stop=(name, call), lines=None, delay_s=0.0)

    def kill_at_random(self) -> None:
        lines, delay_s = self.random.randint(0, 40), self.random.uniform(0.0, 0.06)
        print(f"start {self.starts}: killed {delay_s:.3f} s after line {lines}")
        self._kill(stop=None, lines=lines, delay_s=delay_s)

    def _kill(self, *, stop: tuple[str, int] | None, lines: int | None, delay_s: float) -> None:
        entries: list[Entry] = []
        with self._running(steps=None, stop=stop) as (journal, trainer):
            for entry in journal.entries():
                entries.append(entry)
                if entry["event"] == "stopped" or len(entries) - 1 == lines:
                    break
                assert len(entries) < ENTRIES_MAX, f"the trainer never came to {stop}"
            entries += journal.entries(until_s=time.monotonic() + delay_s)
            trainer.kill()
            entries += journal.entries()
        self._learn(entries)
        assert trainer.wait() == -signal.SIGKILL, entries[-1:]
        self._check_log()

    @contextmanager
    def _running(
        self, *, steps: int | None, stop: tuple[str, int] | None
    ) -> Iterator[tuple[Journal, Forked]]:
        """Start a trainer; whatever happens here, it does not live on."""
        request = {
            "folder": str(self.folder),
            "memory": str(self.memory),
            "start": self.starts,
            "steps": steps,
            "when_full": self._when_full,
            "stop": stop,
        }
        environment = {**os.environ, "PYTHONPATH": str(TRAINER.parents[2])}
        with self.log.open("a") as log:
            command = [str(TRAINER), json.dumps(request)]
            trainer = Forked(server_of(), command, environment, log)
        try:
            yield Journal(trainer.stdout.fileno()), trainer
        finally:
            trainer.kill()
            trainer.wait()
            trainer.close()

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.starts}"

    def _check_log(self) -> None:
        """A thread that failed would only be seen here."""
        text = self.log.read_text()
        assert "Traceback" not in text, text
        self.starts += 1

    def _learn(self, entries: list[Entry]) -> None:
        for entry in entries:
            match entry["event"]:
                case "begun":
                    self.begun.add((entry["step"], self.starts))
                case "committed":
                    self.told[entry["tier"]].add((entry["step"], self.starts))
                case "superseded":
                    self.superseded.add((entry["step"], self.starts))
                case "failed" | "died":
                    raise AssertionError(entry)
                case "restored":
                    self._check_restored(entry)

    # What must be true -----------------------------------------------------------------------------

    def _check_restored(self, entry: Entry) -> None:
        """A start went on from the newest that any tier had when it began."""
        assert entry["wrong"] is None, entry
        who = None if entry["step"] is None else (entry["step"], entry["start"])
        assert entry["said"] == entry["step"], entry
        assert entry["extra"] == (-1 if who is None else entry["step"]), entry
        sure = max(set().union(*self.told.values(), self._before), default=None)
        assert who is None or who in self.begun, f"{who} was never saved"
        assert who not in self.superseded, f"restored {who}, which was superseded"
        assert sure is None or (who is not None and who >= sure), (
            f"restored {who}, though {sure} was there"
        )

    def check(self) -> None:
        """Hold what lies on the tiers against what was reported."""
        self._before = set()
        for tier in TIERS:
            found = read_tier(self.folder / tier)
            self._before |= set(found.committed)
            assert set(found.committed) <= self.begun, f"{tier} holds what nobody saved"
            back = set(found.committed) & self.superseded
            assert not back, f"{tier} holds what was said to be superseded: {back}"
            for who in self.told[tier] - set(found.committed):
                newer = [other for other in found.committed if other > who]
                assert len(newer) >= doomed.KEEP, (
                    f"{tier}: {who} was reported committed and is gone; there is {sorted(found.committed)}"
                )
            for (step, start), path in found.committed.items():
                loaded = tierfall.load(path)
                assert loaded["extra"] == {"step": step}, path
                assert doomed.difference(loaded, start, step) is None, path
            self._check_latest(tier, found)
            if found.newest is not None:
                loaded = tierfall.load(self.folder / tier)
                assert tuple(loaded["who"].tolist()) == found.newest[::-1]

    def _check_latest(self, tier: str, found: OnTier) -> None:
        latest = self.folder / tier / doomed.RUN / "latest"
        if latest.exists():
            named = latest.read_text().strip()
            assert named in {path.name for path in found.committed.values()}, (
                f"{tier}: latest names {named}"
            )

    # Going on in peace -----------------------------------------------------------------------------

    def plant(self) -> None:
        """Put somebody else's files into the run's folder and into a step's folder."""
        run = self.folder / "nvme" / doomed.RUN
        if not run.is_dir():
            return
        steps = [path for path in run.iterdir() if path.name.startswith("step-")]
        for path in (run, *self.random.sample(steps, min(1, len(steps)))):
            (path / FOREIGN).write_text("keep me")
            self._foreign.append(path / FOREIGN)

    def end(self) -> None:
        """Run once to a clean end, and see that nothing but what was asked for is left."""
        steps = 2 * doomed.SLOW_EVERY * doomed.KEEP
        with self._running(steps=steps, stop=None) as (journal, trainer):
            entries = list(journal.entries())
            trainer.wait()
        self._learn(entries)
        assert trainer.wait() == 0, entries[-1:]
        self._check_log()
        assert [e["left"] for e in entries if e["event"] == "drained"] == [[]]
        assert entries[-1]["event"] == "closed", entries[-1]
        self.check()
        for tier in TIERS:
            self._check_tidy(tier)
        left = [path for path in self.memory.rglob("*") if path.is_file()]
        assert sorted(path.name for path in left) == ["slot-0.lock", "tiers.json"], left
        for path in self._foreign:
            assert path.read_text() == "keep me", path

    def _check_tidy(self, tier: str) -> None:
        found = read_tier(self.folder / tier)
        arrived = set(self.told[tier])
        if (
            self._when_full == "supersede"
        ):  # few arrive: what nobody was told of may be among the last
            arrived |= set(found.committed)
        newest = sorted(arrived)[-doomed.KEEP :]
        assert sorted(found.committed) == newest, tier
        foreign = {path.parent for path in self._foreign}
        for path in found.uncommitted:
            assert path in foreign, f"{path} is left"
            assert os.listdir(path) == [FOREIGN], path
        for path in found.committed.values():
            assert set(os.listdir(path)) - {FOREIGN} == _OURS[tier], path
        names = {path.name for path in found.others}
        assert names - {FOREIGN} == {"attempts", "latest", "lineage", "tier.json"}, names
        attempts = found.others[[p.name for p in found.others].index("attempts")]
        assert all(re.fullmatch(r"a\d{4}\.json", name) for name in os.listdir(attempts))
        assert os.listdir(self.folder / tier) == [doomed.RUN]
