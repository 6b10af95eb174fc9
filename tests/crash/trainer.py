"""A trainer to be killed: ``trainer.py REQUEST``, which is a JSON object.

It saves every step, and writes into its journal, which is its standard output, what it is about to do and what was
reported to it. At its point it stands still until it is killed.

    {"folder": PATH, "memory": PATH, "start": N, "steps": N or null, "stop": [POINT, CALL] or null, "when_full": WORD}
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.crash import doomed
from tierfall.tiers import image_writer

image_writer.PART_BYTES = 64 << 10  # so that a packed image is many writes


class Journal:
    """Lines to whoever kills this process; each is one write, so no thread's line is torn by another's."""

    def tell(self, event: str, **members: Any) -> None:
        os.write(1, json.dumps({"event": event, **members}).encode() + b"\n")


class Reporter:
    """Waits for each save on one tier, in the order of the saves, and tells of every one that was reported."""

    def __init__(self, journal: Journal, tier: str) -> None:
        self._journal = journal
        self._tier = tier
        self._handles: queue.SimpleQueue[tierfall.SaveHandle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, handle: tierfall.SaveHandle) -> None:
        if self._tier == "host" or self._tier in handle.tiers:
            self._handles.put(handle)

    def finish(self) -> None:
        self._handles.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (handle := self._handles.get()) is not None:
            try:
                handle.wait(self._tier)
            except tierfall.errors.TierfallError as error:
                lost = handle.outcome == "superseded"
                event = "superseded" if lost else "failed"
                self._journal.tell(event, step=handle.step, tier=self._tier, error=str(error))
            else:
                self._journal.tell("committed", step=handle.step, tier=self._tier)


def train(journal: Journal, config: dict[str, Any], start: int, steps: int | None) -> None:
    """Go on from the newest checkpoint for ``steps`` steps (None: until killed)."""
    with tierfall.open(config) as ckpt:
        reporters = [Reporter(journal, tier) for tier in ("host", "nvme", "slow")]
        state = doomed.blank_state()
        report = ckpt.restore(state)
        found, step = state["who"].tolist() if report else (None, None)
        journal.tell(
            "restored",
            start=found,
            step=step,
            said=report and report.step,
            wrong=report and doomed.difference(state, found, step),
            extra=state["extra"]["step"],
        )
        first = report.step + 1 if report else 0
        for step in count(first) if steps is None else range(first, first + steps):
            with ckpt.guard():
                doomed.fill_state(state, start, step)
            doomed.tensors_of(start, step + 1)  # so that the next update follows the save at once
            journal.tell("begun", step=step)
            handle = ckpt.save(step, state)
            for reporter in reporters:
                reporter.add(handle)
        journal.tell("drained", left=ckpt.drain(60.0).left)
        for reporter in reporters:
            reporter.finish()
    journal.tell("closed")


def main(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    journal = Journal()
    try:
        if request["stop"]:
            name, call = request["stop"]
            doomed.stop_at(name, call, lambda: journal.tell("stopped", at=name))
        folder, memory = Path(request["folder"]), Path(request["memory"])
        config = doomed.config(folder, memory, request["when_full"])
        train(journal, config, request["start"], request["steps"])
    except BaseException as error:
        journal.tell("died", error=f"{type(error).__name__}: {error}")
        logging.exception("the trainer died")
        os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
