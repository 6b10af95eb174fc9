"""Announced steps under any order of messages and steps: each step is saved by all ranks, or given up by all.

A seed decides which rank takes a step next, which message arrives next, and who gets a signal when; messages between
two ranks keep their order. Nothing here waits, so that whatever a rank would need to wait for shows as a step that some
rank neither saved nor left out.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training_loop import HOST, STORE
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage, RankReported
from tierfall.core.types.values import CheckpointId
from tierfall.policies.cadence import CadenceRules
from tierfall.run.announced_steps import AnnouncedSteps
from tierfall.run.cadence import CadenceClock

STEPS = 120
TIERS = (HOST, STORE)
RULES = {
    "time": CadenceRules(every_s=7.0, tiers=TIERS),
    "overhead": CadenceRules(overhead=0.2, tiers=TIERS),
    "signals, and every 9th step": CadenceRules(every_steps=9, tiers=TIERS),
}


class Council:
    """One rank's part: what it says lies in a queue for each rank that is to hear it."""

    def __init__(self, rank: int, wires: list[deque[RankMessage]]) -> None:
        self.topology: Any = SimpleNamespace(is_root=rank == 0, rank=rank)
        self._wires = wires

    def announce(self, topic: Any, body: Any) -> None:
        for wire in self._wires:
            wire.append(DecisionAnnounced(topic=topic, body=body))

    def report(self, topic: Any, body: Any) -> None:
        self._wires[0].append(RankReported(topic=topic, body=body, rank=self.topology.rank))


class Rank:
    def __init__(
        self, rank: int, rules: CadenceRules, wires: list[deque[RankMessage]], job: Job
    ) -> None:
        self.step = 0
        self.saved: list[int] = []
        self.left_out: list[int] = []
        self.job = job
        message_tree: Any = Council(rank, wires)
        self.steps = AnnouncedSteps(
            message_tree,
            run_aside=lambda call: call(),
            leave_out=lambda step, error: self.left_out.append(step),
        )
        self.cadence = CadenceClock(
            rules,
            clock=lambda: job.now_s,
            images=lambda image_bytes: 2,
            copying=lambda: False,
            others=self.steps,
        )

    def train(self) -> None:
        self.step += 1
        if self.cadence.is_due(self.step):
            self.saved.append(self.step)
            handle = SaveHandle(CheckpointId(self.step, 1), (), in_memory="host")
            handle.on_begun(bytes=1, lazy=True, blocked_s=0.5)
            handle.on_captured()
            self.cadence.on_saved(handle)


class Job:
    """All ranks; ``drift`` is how many steps one may be ahead of the slowest."""

    def __init__(self, seed: int, rules: CadenceRules, *, drift: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.wires: list[deque[RankMessage]] = [deque() for _ in range(self.random.randint(2, 5))]
        self.drift = drift
        self.slowness = self.random.choice([0.1, 0.5, 0.9])
        self.ranks = [Rank(rank, rules, self.wires, self) for rank in range(len(self.wires))]

    def run(self) -> None:
        while any(rank.step < STEPS for rank in self.ranks):
            self.now_s += self.random.uniform(0.01, 0.3)
            least = min(rank.step for rank in self.ranks)
            able = [r for r in self.ranks if r.step < STEPS and r.step <= least + self.drift]
            if self.random.random() < 0.01:
                self.random.choice(self.ranks).cadence.request("SIGTERM")
            if self.random.random() < self.slowness:
                self.random.choice(able).train()
            else:
                self._deliver(self.random.randrange(len(self.ranks)))
        for _ in range(3):  # an answer may be answered
            for rank, wire in enumerate(self.wires):
                while wire:
                    self._deliver(rank)
            for one in self.ranks:
                one.cadence.end()

    def _deliver(self, rank: int) -> None:
        if self.wires[rank]:
            self.ranks[rank].steps.on_message(self.wires[rank].popleft())


@pytest.mark.parametrize("drift", [0, 1, 40])
@pytest.mark.parametrize("name", RULES)
def test_each_step_is_saved_by_all_ranks_or_given_up_by_all(name: str, drift: int) -> None:
    whole = given_up = 0
    for seed in range(60):
        job = Job(seed, RULES[name], drift=drift)
        job.run()
        for step in {step for rank in job.ranks for step in rank.saved}:
            without = [rank for rank in job.ranks if step not in rank.saved]
            assert all(rank.left_out.count(step) == 1 for rank in without), f"{seed=} {step=}"
            whole += not without
            given_up += bool(without)
        for rank in job.ranks:
            assert not set(rank.left_out) & set(rank.saved), f"{seed=}"
            assert rank.saved == sorted(rank.saved), f"{seed=}"
    assert whole > 2 * given_up > 0, "most are saved, and some are given up: both were tried"
