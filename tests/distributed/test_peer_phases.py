"""A node is lost in each phase of a job with peer memory, and all start again.

What is promised, for ``copies: N``:

* A step that any rank reported in peer memory is restored, or a newer one, after N nodes are lost at once: bit for bit,
  and with no byte read from storage.
* A start that brings a replaced node back has the copies of before until it reports that peer memory has the
  checkpoint again. Until then, all nodes that were lost before and are lost in it count together. After it, N nodes may
  be lost again.
* Where more are lost, the step on storage is restored, or a newer one, bit for bit.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.distributed.killing import PEER_POINTS
from tests.distributed.peer_jobs import NODES, PROGRAM, STORED, MakeJob, lose

SEED = 20261126
SEEDS, ROUNDS = 6, 5
STEPS = [1, 2, 3]
ON_STORAGE = 2
KEPT: dict[str, dict[str, Any]] = {
    "one copy": {"copies": 1},
    "two copies": {"copies": 2},
}
HOLDERS = {
    "one copy": [{0, 2}, {1, 3}],
    "two copies": [{0, 1, 2}, {1, 2, 3}, {2, 3, 0}, {3, 0, 1}],
}
"""Sets of nodes whose loss, of all in one, costs an image."""
LOSSES = {"one copy": 1, "two copies": 2}
CALLS = {"request": 5, "transfer": 3, "read": 3}
"""How often a rank comes to a point in a restore, or in a save to one other node; to the others once."""

SAVING = [point for point in PEER_POINTS if point != "read"]
BRINGING_BACK = [
    "recovery",
    "recovered",
    "restore",
    "top-up transfer",
    "top-up commit",
    "top-up committed",
    "topped up",
]
NAMES = {"recovery": "read", "recovered": "sealed", "restore": "read"}


@dataclass(frozen=True)
class Case:
    """Node ``node`` is lost in a phase. ``before`` is lost before the start that the phase is of."""

    kept: str
    phase: str
    node: int
    before: int | None = None

    def __str__(self) -> str:
        before = "" if self.before is None else f"-after-{self.before}"
        return f"{self.kept}-{self.phase}-{self.node}{before}".replace(" ", "_")

    @property
    def random(self) -> Random:
        return Random(f"{SEED} {self}")

    @property
    def point(self) -> str:
        return NAMES.get(self.phase, self.phase.removeprefix("top-up "))

    @property
    def call(self) -> int:
        """The call that is the last one: of a request any, of a transfer one in the middle."""
        if self.point == "request":
            return self.random.randint(1, CALLS["request"] * LOSSES[self.kept])
        return 1 + (self.point == "transfer")

    @property
    def lost(self) -> set[int]:
        """The nodes that are lost at once."""
        at_once = 1 if self.before is not None and self.phase != "topped up" else LOSSES[self.kept]
        others = [node for node in NODES if node != self.node]
        return {self.node, *self.random.sample(others, at_once - 1)}

    @property
    def delay_s(self) -> float:
        """How long the others go on after the victim is killed."""
        return self.random.choice([0.0, 0.3])


WHILE_SAVING = [Case(kept, phase, node) for kept in KEPT for phase in SAVING for node in NODES]
WHILE_BRINGING_BACK = [
    Case(kept, phase, node, (node + further) % 4)
    for at, (kept, phase) in enumerate((kept, phase) for kept in KEPT for phase in BRINGING_BACK)
    for node in NODES
    for further in {(at + node) % 4}
]
ALL = WHILE_SAVING + WHILE_BRINGING_BACK
SAMPLE = Random(SEED).sample(WHILE_SAVING, 1) + Random(SEED).sample(WHILE_BRINGING_BACK, 1)


@pytest.mark.parametrize(
    "case",
    [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.torture) for case in ALL],
    ids=str,
)
def test_a_node_is_lost_in_a_phase(make_job: MakeJob, tmp_path: Path, case: Case) -> None:
    given = {"peers": KEPT[case.kept]}
    save(make_job, case, given)
    if case.before is None:
        at_least, from_memory = newest(tmp_path, "durable"), True
    else:
        at_least, from_memory = bring_back(make_job, tmp_path, case, given)
    for node in case.lost:
        lose(tmp_path, node)
    answers = make_job(4, NODES, program=PROGRAM).run("resume", saves=True, **given)
    assert all("step" in answer for answer in answers), answers
    assert len({answer["step"] for answer in answers}) == 1, answers
    assert answers[0]["step"] >= at_least, answers
    assert all(answer["good"] for answer in answers)
    if from_memory:
        assert not any("pfs" in answer["tiers"] for answer in answers), answers


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kept", KEPT)
def test_nodes_are_lost_in_one_start_after_another(
    make_job: MakeJob, tmp_path: Path, kept: str, seed: int
) -> None:
    """Each start is killed at a point of any phase. So many nodes are lost as is promised since a step was reported."""
    random = Random(f"{SEED} {kept} {seed}")
    given = {"peers": KEPT[kept]}
    make_job(4, NODES, program=PROGRAM).run("carry_on", round=0, steps=2, **given)
    reported, lost = newest(tmp_path, "noted-0"), set[int]()
    assert reported == 2
    for round in range(1, ROUNDS + 1):
        lost |= lose_some(tmp_path, kept, lost, random)
        point = random.choice(list(PEER_POINTS))
        victims = random.choice([NODES, *([node] for node in NODES)])
        call = random.randint(1, CALLS.get(point, 1) * (1 if point == "read" else 2))
        job = make_job(4, NODES, program=PROGRAM)
        job.start(
            "carry_on", round=round, steps=2, point=point, call=call, victims=victims, **given
        )
        assert job.wait_for_kill() in victims, job.log(victims[0])
        time.sleep(random.choice([0.0, 0.3]))
        job.kill()
        check_restored(tmp_path, round, reported)
        if (noted := newest(tmp_path, f"noted-{round}")) is not None:
            reported, lost = noted, set()
    lose_some(tmp_path, kept, lost, random)
    answers = make_job(4, NODES, program=PROGRAM).run(
        "carry_on", round=ROUNDS + 1, steps=1, **given
    )
    assert answers == [None] * 4, answers
    assert len(check_restored(tmp_path, ROUNDS + 1, reported)) == 4


def lose_some(folder: Path, kept: str, before: set[int], random: Random) -> set[int]:
    """Lose nodes, as many as the promise has left where those ``before`` are lost."""
    lost: set[int] = set()
    for node in random.sample(NODES, random.randint(0, LOSSES[kept])):
        if not any(nodes <= before | lost | {node} for nodes in HOLDERS[kept]):
            lose(folder, node)
            lost.add(node)
    return lost


def check_restored(folder: Path, round: int, reported: int) -> list[Any]:
    """Check the notes of the ranks that restored a step, and return them."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"restored-{round}-?")]
    assert all(each["step"] >= reported and each["good"] for each in found), (reported, found)
    assert len({(each["step"], each["round"]) for each in found}) <= 1, found
    assert not any("pfs" in each["tiers"] for each in found), found
    return found


def save(make_job: MakeJob, case: Case, given: dict[str, Any]) -> None:
    """Save all steps, and kill all ranks in the phase, or at the end where the phase is of a later start."""
    job = make_job(4, NODES, program=PROGRAM)
    given = {"pfs": STORED, **given}
    if case.before is not None:
        job.start("save_and_note", steps=STEPS, **given).wait_ready()
        job.kill()
        return
    at = {"point": case.point, "call": case.call, "victims": [case.node]}
    job.start("save_and_note", steps=STEPS, **at, **given)
    assert job.wait_for_kill() == case.node, job.log(case.node)
    time.sleep(case.delay_s)
    job.kill()


def bring_back(
    make_job: MakeJob, folder: Path, case: Case, given: dict[str, Any]
) -> tuple[int, bool]:
    """Lose a node, and another in the start after that; return which step is restored after it at least, and whether
    from memory alone."""
    assert case.before is not None
    lose(folder, case.before)
    job = make_job(4, NODES, program=PROGRAM)
    if case.phase == "topped up":
        job.start("bring_back", **given).wait_ready()
    else:
        victims = NODES if case.phase.startswith("top-up") else [case.before]
        victims = [case.node] if case.phase == "restore" else victims
        at = {"point": case.point, "call": case.call, "victims": victims}
        job.start("bring_back", late=case.phase == "restore", **at, **given)
        assert job.wait_for_kill() in victims, job.log(case.node)
        time.sleep(case.delay_s)
    job.kill()
    if (step := newest(folder, "again")) is not None:
        return step, True
    whole = not any(nodes <= case.lost | {case.before} for nodes in HOLDERS[case.kept])
    return (STEPS[-1], True) if whole else (ON_STORAGE, False)


def newest(folder: Path, name: str) -> Any:
    """Return the newest step that any rank has noted; None where there is none."""
    steps = [int(line) for path in folder.glob(f"{name}-*") for line in path.read_text().split()]
    return max(steps, default=None)
