"""Requests to assign replicas: each save gets the same answer on all ranks, or none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.core.ranks.network import Network
from tierfall.core.flush.messages import Messages, SaveFailure
from tierfall.core.flush.replicas import ReplicaAssigner
from tierfall.core.flush.tasks import AssignmentRequest
from tierfall.core.image.dedup import ReplicaAssignment, ReplicatedTensors
from tierfall.core.image.layout import plan_layout
from tierfall.core.state.walk import walk_state
from tierfall.core.types.values import CheckpointId

MAX_WAIT_S = 10.0
UNANSWERED = "unanswered"


def shareable(width: int, *, alike: bool = True) -> ReplicatedTensors:
    torch.manual_seed(0)
    model = nn.Linear(width, 3, bias=False)
    view = walk_state({"model": model} if alike else {"x": torch.zeros(width)})
    return ReplicatedTensors(view, plan_layout(view).structure, 1 << 20)


class Job:
    """The dividers of all ranks over one network."""

    def __init__(self, nodes: list[str], seed: int = 0) -> None:
        self.network = Network(nodes, seed=seed)
        self.refused: dict[CheckpointId, SaveFailure] = {}
        messages = [Messages(tree) for tree in self.network.message_trees]
        self.dividers = [
            ReplicaAssigner(
                each,
                wake_at=lambda when_s: None,
                max_wait_s=MAX_WAIT_S,
                refuse=self.refused.__setitem__,
            )
            for each in messages
        ]
        self.answers: list[Any] = [UNANSWERED for _ in nodes]
        for each, message_tree in zip(messages, self.network.message_trees, strict=True):
            message_tree.on_message = each.on_message

    def ask(self, rank: int, step: int, share: ReplicatedTensors) -> None:
        def answer(division: ReplicaAssignment | None) -> None:
            self.answers[rank] = division

        self.answers[rank] = UNANSWERED
        asked = AssignmentRequest(id=CheckpointId(step, 1), shareable=share, on_answer=answer)
        self.dividers[rank].request(asked)

    def begin(self, rank: int, step: int) -> None:
        self.dividers[rank].save_begun(CheckpointId(step, 1))

    def wait(self, until_s: float, *, since_s: float = 0.0) -> None:
        self.network.deliver()
        for now_s in np.arange(since_s, until_s, 0.5):
            for divider in self.dividers:
                divider.tick(float(now_s))
            self.network.deliver()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_ranks_do_each_that_asks_is_answered_soon_and_alike(seed: int) -> None:
    draw = random.Random(seed)
    job = Job([draw.choice("abc") for _ in range(draw.randint(2, 5))], seed)
    ranks = range(len(job.answers))
    now_s = 0.0
    for step in range(1, 6):
        asking = [rank for rank in ranks if draw.random() < 0.7]
        for rank in draw.sample(list(ranks), len(ranks)):
            if rank in asking:
                job.ask(rank, step, shareable(draw.choice([4, 5]), alike=draw.random() < 0.9))
            else:
                job.begin(rank, step)
            job.network.deliver(draw.randint(0, 6))
        job.wait(now_s + MAX_WAIT_S + 1, since_s=now_s)
        now_s += MAX_WAIT_S + 2
        waiting = [rank for rank in asking if job.dividers[rank]._constant_table is None]
        assert all(job.answers[rank] != UNANSWERED for rank in waiting)
        made = [job.answers[rank] for rank in waiting]
        assert len({answer and answer.id for answer in made}) <= 1
        for rank in ranks:
            job.begin(rank, step)
