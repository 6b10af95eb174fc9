"""Mistakes that people make in calls: each answer has the place, and what was expected or to do, and ends at the user's
line."""

from __future__ import annotations

import argparse
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierfall
from tierfall.errors import TierfallError
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

REMEDIES = re.compile(
    "expected|did you mean|belongs|it is a key|remove|put it in quotes|set it|write|add |indented|keep|first|must be|"
    "there are|not known|nearest|leave it out|save |close it|open another|is not a device|has a codec|register_codec|"
    "is not one of|names no|holds no|only=|resize=|wait.timeout|put the object itself|is not a type|for a |check "
)


class Run:
    """An open run with a saved step 50, and the state of it. No later step is due: what cannot be meant is answered at
    once, and not at the first step that is due."""

    def __init__(self, ckpt: tierfall.Checkpointer, config: dict[str, Any]) -> None:
        self.ckpt, self.config = ckpt, config
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"m": self.model, "o": self.optimizer}
        self.handle = ckpt.save(50, self.state, block=True)

    def save(self, value: object) -> object:
        return self.ckpt.save(60, {"a": value})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("mistakes")
    host = {"name": "host", "kind": "host", "folder": str(root / "m"), "capacity": "2MiB"}
    disk = {"name": "disk", "kind": "file", "path": str(root / "d")}
    config = {"run": "r", "interval": {"every": 1000}, "tiers": [host, disk]}
    with tierfall.open(config) as ckpt:
        yield Run(ckpt, config)


CALLS: dict[str, Callable[[Run], object]] = {
    "open None": lambda r: tierfall.open(None),  # type: ignore[arg-type]
    "open a folder": lambda r: tierfall.open("/"),
    "open an address": lambda r: tierfall.open("s3://bucket"),
    "open with a number as run": lambda r: tierfall.open(r.config, run=5),  # type: ignore[arg-type]
    "open with a group and no torch.distributed": lambda r: tierfall.open(r.config, process_group=1),
    "load what is not there": lambda r: tierfall.load("/nope"),
    "load to no device": lambda r: tierfall.load(r.config, map_location="gpu"),
    "load a step as text": lambda r: tierfall.load(r.config, step="last"),  # type: ignore[arg-type]
    "state and step swapped": lambda r: r.ckpt.save(r.state, 60),  # type: ignore[arg-type]
    "a NumPy RandomState": lambda r: r.save(np.random.RandomState(0)),
    "a DataLoader": lambda r: r.save(torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
    "a thread": lambda r: r.save(threading.Thread()),
    "a parser": lambda r: r.save(argparse.ArgumentParser()),
    "restore into None": lambda r: r.ckpt.restore(None),  # type: ignore[arg-type]
    "restore into a model": lambda r: r.ckpt.restore(r.model),  # type: ignore[arg-type]
    "restore a step as text": lambda r: r.ckpt.restore(r.state, step="7"),  # type: ignore[arg-type]
    "restore from an unknown tier": lambda r: r.ckpt.restore(r.state, tier="s3"),
    "rename as a list": lambda r: r.ckpt.restore(r.state, rename=["a"]),  # type: ignore[arg-type]
    "rename of an unknown name": lambda r: r.ckpt.restore(r.state, rename={"x": "y"}),
    "an unknown word for unreachable": lambda r: r.ckpt.restore(r.state, unreachable="skip"),
    "a part of the state": lambda r: r.ckpt.restore({"m": r.model}),
    "wait for a time as a tier": lambda r: r.handle.wait(60),  # type: ignore[arg-type]
    "wait for a time as text": lambda r: r.handle.wait(timeout="5s"),  # type: ignore[arg-type]
    "drain with a time as text": lambda r: r.ckpt.drain("30s"),  # type: ignore[arg-type]
    "drain with a negative time": lambda r: r.ckpt.drain(-1),
    "pin text": lambda r: r.ckpt.pin("x"),  # type: ignore[arg-type]
    "wait_captured with text": lambda r: r.ckpt.wait_captured("1"),  # type: ignore[arg-type]
    "a codec of int": lambda r: tierfall.register_codec(int, "i", str, int),
    "a codec without a name": lambda r: tierfall.register_codec(Run, "", str, int),
    "a codec of None": lambda r: tierfall.register_codec(None, "x", str, str),  # type: ignore[arg-type]
    "maybe_save with a step as a tensor": lambda r: r.ckpt.maybe_save(torch.tensor([1, 2]), r.state),  # type: ignore[arg-type]
    "restore a step as a tensor": lambda r: r.ckpt.restore(r.state, step=torch.tensor([1, 2])),  # type: ignore[arg-type]
    "load only a number": lambda r: r.ckpt.load(only=5),  # type: ignore[arg-type]
    "load only an unknown name": lambda r: r.ckpt.load(only=["x"]),
    "load with None as resume": lambda r: r.ckpt.load(resume=None),  # type: ignore[arg-type]
    "maybe_save of a model": lambda r: r.ckpt.maybe_save(60, r.model),  # type: ignore[arg-type]
    "maybe_save with tags as text": lambda r: r.ckpt.maybe_save(60, r.state, tags="best"),
    "strict as text": lambda r: r.ckpt.restore(r.state, strict="no"),  # type: ignore[arg-type]
    "delete with text": lambda r: r.ckpt.delete(50, even_the_last="no"),  # type: ignore[arg-type]
    "prune with None": lambda r: r.ckpt.prune(dry_run=None),  # type: ignore[arg-type]
    "open a web page": lambda r: tierfall.open("https://x"),
    "open below a file": lambda r: tierfall.open({"run": "other", "tiers": "/dev/null/folder"}),
    "read a pointer of None": lambda r: tierfall.read_pointer(None),  # type: ignore[arg-type]
    "write a pointer to a number": lambda r: r.ckpt.write_pointer(5, 50),  # type: ignore[arg-type]
    "a TierWriter of None": lambda r: TierWriter(None, step=60),  # type: ignore[arg-type]
    "a TierWriter with None as tags": lambda r: TierWriter(r.ckpt, step=60, tags=None),  # type: ignore[arg-type]
    "a TierReader of None": lambda r: TierReader(None),  # type: ignore[arg-type]
    "a LazyStager of None": lambda r: LazyStager(None),  # type: ignore[arg-type]
    "a LazyStager without a TierWriter": lambda r: LazyStager(r.ckpt).stage({}),
    "item that never changes": lambda r: tierfall.item(r.model, changes="never"),
    "item of an unknown resize": lambda r: tierfall.item(r.model, on_resize="x"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_cannot_be_meant_is_answered_by_what_was_expected(what: str, run: Run) -> None:
    before = [parameter.clone() for parameter in run.model.parameters()]
    with pytest.raises(TierfallError) as caught:
        CALLS[what](run)
    message = str(caught.value)
    assert REMEDIES.search(message), message
    assert len(message.splitlines()[0]) <= 400
    frames = [f for f in traceback.extract_tb(caught.tb) if f.filename != __file__]
    assert len(frames) == 1, frames
    assert all(map(torch.equal, before, run.model.parameters()))
    assert [info.step for info in run.ckpt.checkpoints()] == [50]
