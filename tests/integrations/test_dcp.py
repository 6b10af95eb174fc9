"""DCP in one process: what it saves through a TierWriter is a checkpoint of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tierfall
from tests.integrations.dcp_help import QUIET
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import (
    UnreachableError,
)
from tierfall.integrations.dcp import TierReader, TierWriter
from tierfall.integrations.dcp.planning import CompleteLoadPlanner

pytestmark = pytest.mark.filterwarnings(QUIET)

MakeConfig = Callable[..., dict[str, Any]]


# Loading ---------------------------------------------------------------------------------------------


def test_a_planner_that_leaves_no_tensor_out(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        saved = {"kept": torch.ones(3), "other": {"left": torch.ones(2), "n": 1}}
        dcp.save(saved, storage_writer=TierWriter(ckpt, step=1))
        found = {"kept": torch.zeros(3)}
        with pytest.raises(CheckpointException, match=r"1 tensors that .* such as other\.left"):
            dcp.load(found, storage_reader=TierReader(ckpt), planner=CompleteLoadPlanner())
        assert found["kept"].sum() == 0
        dcp.load(found, storage_reader=TierReader(ckpt), planner=CompleteLoadPlanner(["other"]))
        assert found["kept"].sum() == 3


def test_what_could_not_be_read_is_not_taken_for_damaged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header can be read."""
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            state = {"n": step, "w": torch.full((1 << 17,), float(step))}
            dcp.save(state, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    read_into = PosixBackend.read_into

    def away(self: PosixBackend, key: str, offset: int, view: memoryview) -> None:
        if "step-00000002" in key and key.endswith(".safetensors") and offset >= 1 << 18:
            raise UnreachableError(f"{key} is away for a moment")
        read_into(self, key, offset, view)

    with tierfall.open(make_config()) as ckpt, monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "read_into", away)
        state = {"n": 0, "w": torch.zeros(1 << 17)}
        with pytest.raises(CheckpointException, match="is away for a moment"):
            dcp.load(state, storage_reader=(reader := TierReader(ckpt)))
        assert not reader.damaged
        patch.undo()
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state["n"] == 2


def test_names_that_dcp_cannot_tell_apart_are_refused(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"a.b": 1, "a": {"b": torch.ones(1)}}, block=True)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"a.b": 0}, storage_reader=TierReader(ckpt))
    assert caught.match("have the same name 'a.b' in DCP")
