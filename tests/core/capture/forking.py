"""A program that forks while a state is captured, once for each deed of a child; it says what became of both.

Children are forked from a process of its own, which starts no test's threads. Each deed is one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.core.capture.lazy_help import Trainer, saved, warmed_up
from tierfall.core.capture.handle import SaveHandle

PATIENCE_S = 20
FIRST = 2
Deed = Callable[["Run"], object]
BY_CHILD: dict[str, Deed] = {}
"""What a child that was forked by hand does; what it returns is told."""


def by_child(deed: Deed) -> Deed:
    BY_CHILD[deed.__name__] = deed
    return deed


class Run:
    """The run of the parent, with a lazy save under way."""

    def __init__(self, ckpt: tierfall.Checkpointer, folder: Path) -> None:
        self.ckpt = ckpt
        self.folder = folder
        self.trainer = Trainer()
        self.handle: SaveHandle | None = None

    @property
    def saved(self) -> SaveHandle:
        assert self.handle is not None
        return self.handle


# What children do -------------------------------------------------------------------------------------


@by_child
def writes_over_the_image(run: Run) -> object:
    snapshot = run.ckpt._capturer._current
    assert snapshot is not None
    snapshot.region.image[:] = b"\xff" * len(snapshot.region.image)
    return None


@by_child
def frees_storages(run: Run) -> object:
    for parameter in run.trainer.model.parameters():
        parameter.untyped_storage().resize_(0)
    for entries in run.trainer.optimizer.state.values():
        entries["exp_avg"].share_memory_()
    return None


@by_child
def ends_as_programs_do(run: Run) -> object:
    """By way of everything that called it, and of all that Python does at the end."""
    sys.exit(3)


@by_child
def raises_in_the_with_block(run: Run) -> object:
    with run.ckpt:
        raise ZeroDivisionError("the child's own")


@by_child
def leaves_the_with_block(run: Run) -> object:
    with run.ckpt:
        return "left"


# The program ------------------------------------------------------------------------------------------


def config(folder: Path, memory: Path) -> dict[str, Any]:
    return {
        "run": "run",
        "chunk": "16KiB",
        "capture": {"bandwidth": "300KB/s"},  # the parent's thread is far from done when it forks
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(memory), "capacity": "4MiB"},
            {"name": "disk", "kind": "file", "path": str(folder / "disk")},
        ],
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def forked(deed: Deed, run: Run) -> dict[str, Any]:
    """Fork a child that does a deed; return how it ended, and what it told."""
    ear, mouth = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)  # which ends it
        torch.set_num_threads(1)
        try:
            os.write(mouth, json.dumps({"told": deed(run)}).encode())
        except Exception as error:  # noqa: BLE001 - told to the parent
            text = "".join(traceback.format_exception_only(error))
            os.write(mouth, json.dumps({"error": text}).encode())
        os._exit(0)
    os.close(mouth)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = os.read(ear, 1 << 16)
    os.close(ear)
    return {"code": code, "seconds": time.monotonic() - began, **json.loads(told or b"{}")}


def live(name: str, step: int, run: Run) -> dict[str, Any]:
    """Save, let the deed be done meanwhile, train on, and hold the checkpoint against the state at the save."""
    trainer = run.trainer
    before = trainer.now()
    run.handle = run.ckpt.save(step, trainer.state)
    assert run.handle.stats.lazy
    under_way = not run.handle.done("host")
    answer = forked(BY_CHILD[name], run)
    trainer.step()
    run.handle.wait(timeout=PATIENCE_S)
    fresh = Trainer()
    run.ckpt.restore(fresh.state, step=step, tier="host", only=["model", "optimizer"])
    return {
        **answer,
        "under_way": under_way,
        "in_memory": same(before, fresh.now()),
        "on_disk": same(before, saved(run.folder / "disk", step)),
    }


def main(folder: Path, memory: Path) -> None:
    with tierfall.open(config(folder, memory)) as ckpt:
        run = Run(ckpt, folder)
        warmed_up(ckpt, run.trainer)
        for step, name in enumerate(BY_CHILD, FIRST):
            print(json.dumps({"deed": name, **live(name, step, run)}), flush=True)
            run.trainer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
