"""DCP on several ranks that are threads of this process: its collectives, without a process group.

``dcp.save(..., process_group=group)`` then goes together with the other ranks', from whichever thread it is called.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.utils import _DistWrapper

from tests.core.ranks.threads import PATIENCE_S


class Group:
    """One rank's place in a job of DCP; ``of`` makes those of all."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self.meeting = meeting

    @classmethod
    def of(cls, world_size: int) -> list[Group]:
        meeting = Meeting(world_size)
        return [cls(rank, world_size, meeting) for rank in range(world_size)]


class Meeting:
    """Where all ranks put down what they say, and read what the others did."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._said: list[bytes] = [b""] * world_size

    def gather(self, rank: int, thing: Any) -> list[Any]:
        """Return what each rank said, as pickling left it: no rank shares an object with another."""
        self._said[rank] = pickle.dumps(thing)
        self._barrier.wait(PATIENCE_S)
        found = [pickle.loads(output) for output in self._said]
        self._barrier.wait(PATIENCE_S)
        return found


class Together(_DistWrapper):
    """What DCP calls its collectives by."""

    def __init__(self, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        super().__init__(None, False, coordinator_rank)
        self.own: Group = group
        self.rank = group.rank
        self.is_coordinator = group.rank == coordinator_rank

    def get_world_size(self) -> int:
        return self.own.world_size

    def broadcast_object(self, object: Any) -> Any:
        return self.all_gather_object(object)[self.coordinator_rank]

    def gather_object(self, object: Any) -> list[Any] | None:
        found = self.all_gather_object(object)
        return found if self.is_coordinator else None

    def all_gather_object(self, object: Any) -> list[Any]:
        return self.own.meeting.gather(self.rank, object)

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        output = self.all_gather_object(object_list)[self.coordinator_rank]
        return output[self.rank]

    def barrier(self) -> None:
        self.all_gather_object(None)


def let_threads_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DCP's collectives done by the ``Group`` that it is given as its process group."""
    for module in (state_dict_saver, state_dict_loader):
        monkeypatch.setattr(module, "_DistWrapper", Together)
