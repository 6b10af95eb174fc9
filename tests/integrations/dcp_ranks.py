"""What one rank does in the tests of DCP on several ranks: functions that a ``Crew`` calls by name.

Each gets the rank, and the folder of the run. The ranks from ``world_size`` on do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tierfall
from tests.integrations.dcp_help import Renaming, emptied, same
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
PATIENCE_S = 20.0
State = dict[str, Any]


class Failing(DefaultSavePlanner):
    """Has no plan."""

    def create_local_plan(self) -> Any:
        raise ValueError("this rank cannot plan")


class Job:
    """A rank's Checkpointer, and the group by which DCP meets."""

    def __init__(self, ckpt: tierfall.Checkpointer, group: Any) -> None:
        self.ckpt = ckpt
        self.group = group

    def save(self, state: State, step: int, *, lazy: bool = False, **options: Any) -> str:
        """Save a step; return what DCP has raised."""
        writer = TierWriter(self.ckpt, step=step, until="disk")
        words = {"storage_writer": writer, "process_group": self.group, **options}
        try:
            if lazy:
                future: Any = dcp.async_save(state, async_stager=LazyStager(self.ckpt), **words)
                future.result(PATIENCE_S)
            else:
                dcp.save(state, **words)
        except CheckpointException as error:
            return str(error)
        return ""

    def load(self, state: State, **options: Any) -> State:
        reader = TierReader(self.ckpt, **options)
        dcp.load(state, storage_reader=reader, process_group=self.group)
        return state

    def steps(self, tier: str = "disk") -> list[int]:
        return [c.step for c in self.ckpt.checkpoints() if tier in c.copies]


@contextmanager
def job(rank: int, folder: str, world_size: int, **disk: Any) -> Iterator[Job | None]:
    group = dist.new_group(list(range(world_size)))
    if rank >= world_size:
        yield None
        return
    host = {"name": "host", "kind": "host", "folder": f"{folder}/memory"}
    stored = {"name": "disk", "kind": "file", "path": f"{folder}/disk", "shared": True, **disk}
    config = {"run": "run", "max_wait": "10s", "tiers": [host, stored]}
    with tierfall.open(config, process_group=group) as ckpt:
        yield Job(ckpt, group)


def cannot_save(rank: int, folder: str, lazy: bool) -> Any:
    """Rank 1 has a function in its state at step 1."""
    with job(rank, folder, 2) as mine:
        if mine is None:
            return None
        state = {"w": torch.ones(5), "value": print if rank == 1 else 1}
        first = mine.save(state, 1, lazy=lazy)
        return [first, mine.save({**state, "value": 1}, 2, lazy=lazy), mine.steps()]


def cannot_plan(rank: int, folder: str) -> Any:
    with job(rank, folder, 2) as mine:
        if mine is None:
            return None
        state = {"w": torch.ones(5)}
        first = mine.save(state, 1, planner=Failing() if rank == 1 else None)
        return [first, mine.save(state, 2), mine.steps()]


def plans_wrongly(rank: int, folder: str, renames: bool) -> Any:
    """The state is captured before DCP plans: by both ranks under other names, or by rank 1 not at all."""
    with job(rank, folder, 2) as mine:
        if mine is None:
            return None
        state = {"w": torch.full((5,), 7.0), "own": rank}
        planner = Renaming() if renames else Failing() if rank == 1 else None
        said = [mine.save(state, 1, lazy=True, planner=planner), mine.save(state, 2, lazy=True)]
        mine.ckpt.drain()
        found = mine.load(emptied(state), step=1, resume=False)
        return [*said, mine.steps(), same(found, state)]


def values(rank: int, folder: str, world_size: int, saves: bool) -> Any:
    """Save values that are each rank's own, or load them; on one rank those of rank 1 too."""

    def state(number: int) -> State:
        return {"rng": {"seed": 100 + number, "at": [number]}, "w": torch.arange(6.0)}

    with job(rank, folder, world_size) as mine:
        if mine is None:
            return None
        if saves:
            return mine.save(state(rank), 1)
        try:
            return same(mine.load(emptied(state(0))), state(rank))
        except CheckpointException as error:
            return [str(error), same(mine.load(emptied(state(0)), values_of=1), state(1))]


def saves_within_a_load(rank: int, folder: str) -> Any:
    """Between DCP's two calls other saves go on, which a rule makes room for."""

    def state(step: int) -> State:
        return {"w": torch.full((50_000,), float(step))}

    with job(rank, folder, 2, retain={"last": 1}) as mine:
        if mine is None:
            return None
        within: list[list[int]] = []

        class Slow(TierReader):
            def set_up_storage_reader(self, *given: Any, **named: Any) -> None:
                for step in (2, 3, 4):
                    mine.save(state(step), step)
                mine.ckpt.prune()
                within.append(mine.steps())

        mine.save(state(1), 1)
        found, reader = state(0), Slow(mine.ckpt, step=1, resume=False)
        dcp.load(found, storage_reader=reader, process_group=mine.group)
        mine.ckpt.drain(PATIENCE_S)
        mine.ckpt.prune()
        return [within, same(found, state(1)), mine.steps()]


def parts(rank: int, folder: str, world_size: int, saves: bool) -> Any:
    """Save steps 1 and 2 of a tensor for each rank; or load two of them, and the values of rank 2."""

    def state(number: int, step: int) -> State:
        return {f"w{number}": torch.full((4,), float(step)), "own": number}

    with job(rank, folder, world_size) as mine:
        if mine is None:
            return None
        if saves:
            return [mine.save(state(rank, step), step) for step in (1, 2)]
        wanted = {**emptied(state(0, 0)), "w1": torch.zeros(4)}
        found = mine.load(wanted, values_of=2)
        return same(found, {**state(0, 1), **state(1, 1), "own": 2})
