"""The process that trains, and that the demo kills: ``python -m tierfall.demo.trainer``.

It is an ordinary user of tierfall's public API. It writes a line of JSON when it is ``ready``, for each ``step``, and
when it has ``ended``; the event log of the run records its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import tierfall
from tierfall.demo.model import fingerprint
from tierfall.demo.training import (
    NORMAL,
    SMALL,
    Training,
    english_text,
    make_deterministic,
    train,
)


def main() -> None:
    """Train from what the tiers hold, or from the start, to the last step."""
    parser = argparse.ArgumentParser(prog="tierfall.demo.trainer", description=main.__doc__)
    parser.add_argument(
        "--config", type=Path, help="the chain of tiers; without it nothing is saved"
    )
    parser.add_argument("--steps", type=int, required=True, help="the last step")
    parser.add_argument("--log", type=Path, required=True, help="the file for its lines")
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
    with options.log.open("w", buffering=1) as log, opened as ckpt:
        run(training, steps=options.steps, ckpt=ckpt, log=log, pace_s=options.pace)


def run(
    training: Training,
    *,
    steps: int,
    ckpt: tierfall.Checkpointer | None,
    log: IO[str],
    pace_s: float,
) -> None:
    """Restore, train to ``steps``, and wait until the last checkpoint is on every tier that is to have it."""
    report = ckpt.restore(training.state) if ckpt is not None else None
    write(log, "ready", restored=report and restored(report), fingerprint=digest(training))
    first = report.step + 1 if report else 1
    for done in train(training, first=first, last=steps, ckpt=ckpt, pace_s=pace_s):
        write(log, "step", step=done.step, loss=done.loss.hex(), seconds=done.seconds)
    if ckpt is not None:
        ckpt.drain()
    write(log, "ended", fingerprint=digest(training))


def write(log: IO[str], kind: str, **members: Any) -> None:
    log.write(json.dumps({"kind": kind, "wall_time_s": time.time(), **members}) + "\n")


def restored(report: tierfall.RestoreReport) -> dict[str, Any]:
    """Report what was restored: each shard's source as shard, tier and bytes, and the skipped copies with reasons."""
    return {
        "step": report.step,
        "attempt": report.attempt,
        "seconds": report.seconds,
        "sources": [(source.shard, source.tier, source.bytes) for source in report.sources],
        "fallbacks": [(fallback.what, fallback.reason) for fallback in report.fallbacks],
    }


def digest(training: Training) -> str:
    """Return a digest of model and optimizer state."""
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for index, moments in training.optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer.{index}.{name}": value for name, value in moments.items()})
    return fingerprint(tensors)


if __name__ == "__main__":
    main()
