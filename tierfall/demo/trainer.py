"""The process that trains, and that the demo kills: ``python -m tierfall.demo.trainer``.

It is an ordinary user of tierfall's public API. Once a step it writes what it knows of its tiers to the event file, on
the training thread; it starts nothing in the background.
"""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import tierfall
from tierfall.demo.data import english_text
from tierfall.demo.events import (
    Ended,
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
from tierfall.demo.model import fingerprint, parameter_count
from tierfall.demo.training import NORMAL, SMALL, Trained, Training, make_deterministic, train

WHOLE = ("sealed", "committed")
LOOK_S = 0.1
"""How often it looks at its tiers when there is nothing else to do."""


def main() -> None:
    """Train from what the tiers hold, or from the start, to the last step."""
    parser = argparse.ArgumentParser(prog="tierfall.demo.trainer", description=main.__doc__)
    parser.add_argument(
        "--config", type=Path, help="the chain of tiers; without it nothing is saved"
    )
    parser.add_argument("--steps", type=int, required=True, help="the last step")
    parser.add_argument("--log", type=Path, required=True, help="the event file to write")
    parser.add_argument("--small", action="store_true", help="a much smaller model")
    parser.add_argument(
        "--pace", type=float, default=0.0, help="the seconds that a step takes at least"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; expected 1 or more")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # blocked while this process was started
    make_deterministic()
    training = Training(SMALL if options.small else NORMAL, english_text(), steps=options.steps)
    opened = tierfall.open(options.config) if options.config else nullcontext()
    with EventWriter(options.log) as log, opened as ckpt:
        run(training, steps=options.steps, ckpt=ckpt, log=log, pace_s=options.pace)


def run(
    training: Training,
    *,
    steps: int,
    ckpt: tierfall.Checkpointer | None,
    log: EventWriter,
    pace_s: float = 0.0,
) -> None:
    """Restore, train to ``steps``, and finish every flush, telling each to ``log``."""
    if ckpt is not None:
        log.write(Looked(time_s=time.monotonic(), tiers=look(ckpt)[0]))
    restored = restore(training, ckpt) if ckpt is not None else None
    log.write(
        Started(
            parameters=parameter_count(training.model),
            restored=restored,
            fingerprint=digest(training),
        )
    )
    saves = Saves(log)

    def told(done: Trained) -> None:
        if done.handle is not None:
            saves.add(done.handle, began_s=done.saved_s)
        saves.tell()
        tiers, totals = look(ckpt)
        log.write(
            StepDone(
                step=done.step,
                loss=done.loss.hex(),
                seconds=done.seconds,
                time_s=time.monotonic(),
                tiers=tiers,
                totals=totals,
            )
        )

    first = restored.step + 1 if restored else 1
    train(training, first=first, last=steps, ckpt=ckpt, told=told, pace_s=pace_s)
    if ckpt is not None:
        drain(ckpt, log)
    saves.tell()
    tiers, totals = look(ckpt)
    log.write(
        Ended(fingerprint=digest(training), time_s=time.monotonic(), tiers=tiers, totals=totals)
    )


def drain(ckpt: tierfall.Checkpointer, log: EventWriter) -> None:
    """Wait until what is owed is durable, looking from time to time; a tier that takes nothing is not waited for."""
    before, still = None, False
    while True:
        report = ckpt.drain(None if still else LOOK_S)
        early_s = LOOK_S - report.seconds
        if (
            report.left and early_s > 0
        ):  # a copy that takes longer than until the next look goes on after the drain
            time.sleep(early_s)
        now = look(ckpt)[0]
        log.write(Looked(time_s=time.monotonic(), tiers=now))
        if still or not report.left:
            return
        before, still = now, now == before


class Saves:
    """Follows saves by their handles, and tells ``log`` of each as often as it has come further."""

    def __init__(self, log: EventWriter) -> None:
        self._log = log
        self._open: dict[tierfall.SaveHandle, Saved] = {}

    def add(self, handle: tierfall.SaveHandle, *, began_s: float) -> None:
        saved = Saved(
            checkpoint=f"{handle.step}@{handle.attempt}",
            began_s=began_s,
            captured_s=None,
            durable_s={},
        )
        self._open[handle] = saved
        self._log.write(saved)

    def tell(self) -> None:
        for handle, known in list(self._open.items()):
            stats = handle.stats
            now = replace(known, captured_s=stats.captured_s, durable_s=stats.durable_s)
            if now != known:
                self._open[handle] = now
                self._log.write(now)
            if now.captured_s is not None and now.durable_s.keys() >= set(handle.tiers):
                del self._open[handle]


def restore(training: Training, ckpt: tierfall.Checkpointer) -> Restored | None:
    """Restore the newest step, and say where it came from."""
    report = ckpt.restore(training.state)
    if report is None:
        return None
    return Restored(
        step=report.step,
        attempt=report.attempt,
        seconds=report.seconds,
        time_s=time.monotonic(),
        sources=tuple((source.shard, source.tier, source.bytes) for source in report.sources),
        fallbacks=tuple((fallback.what, fallback.reason) for fallback in report.fallbacks),
    )


def look(ckpt: tierfall.Checkpointer | None) -> tuple[dict[str, TierNow], Totals | None]:
    """Ask the Checkpointer what is where, and what it has cost so far."""
    if ckpt is None:
        return {}, None
    infos, counted = ckpt.checkpoints(), ckpt.statistics()
    image_bytes = max((info.bytes for info in infos), default=0)
    moved = moved_bytes(counted.edge_bytes)
    names = {name: None for info in infos for name in info.tiers} | dict.fromkeys(moved)
    tiers = {}
    for name in names:
        states = {f"{info.step}@{info.attempt}": info.tiers.get(name) for info in infos}
        done = counted.commits.get(name, 0) * image_bytes
        tiers[name] = TierNow(
            whole=tuple(id for id, state in states.items() if state in WHOLE),
            arriving=next((id for id, state in states.items() if state == "arriving"), None),
            arrived_bytes=max(0, moved.get(name, 0) - done),
            moved_bytes=moved.get(name, 0),
        )
    totals = Totals(
        saves=counted.saves,
        blocked_s=counted.blocked_s * counted.saves,
        image_bytes=image_bytes,
        edge_bytes=dict(counted.edge_bytes),
        packed={
            name: Packed(
                raw_bytes=one.raw_bytes, stored_bytes=one.stored_bytes, seconds=one.seconds
            )
            for name, one in counted.compression.items()
        },
    )
    return tiers, totals


def moved_bytes(edge_bytes: Mapping[str, int]) -> dict[str, int]:
    """Add up, per target, what came over its edges."""
    moved: dict[str, int] = {}
    for edge, count in edge_bytes.items():
        target = edge.partition("->")[2]
        moved[target] = moved.get(target, 0) + count
    return moved


def digest(training: Training) -> str:
    """Return a digest of model and optimizer state."""
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for index, moments in training.optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer.{index}.{name}": value for name, value in moments.items()})
    return fingerprint(tensors)


if __name__ == "__main__":
    main()
