"""Requests to assign replicas: each save gets the same answer on all ranks, or none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.core.ranks.network import Network
from tierfall.core.capture.snapshot import ReplicaShare
from tierfall.core.image.dedup import ReplicaAssignment, ReplicatedTensors
from tierfall.core.image.layout import plan_layout
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankReported
from tierfall.core.scheduler.group.dedup import ASK_AGAIN_S, ReplicaAssigner
from tierfall.core.scheduler.group.messages import ImageShare, SaveFailure
from tierfall.core.scheduler.ledger.tasks import AssignmentRequest
from tierfall.core.state.walk import walk_state
from tierfall.core.types.values import CheckpointId

MAX_WAIT_S = 10.0
UNANSWERED = "unanswered"


def shareable(width: int, *, alike: bool = True) -> ReplicatedTensors:
    torch.manual_seed(0)
    model = nn.Linear(width, 3, bias=False)
    view = walk_state({"model": model} if alike else {"x": torch.zeros(width)})
    return ReplicatedTensors(view, plan_layout(view).structure)


class Job:
    """The dividers of all ranks over one network."""

    def __init__(self, nodes: list[str], seed: int = 0) -> None:
        self.network = Network(nodes, seed=seed)
        self.refused: dict[CheckpointId, SaveFailure] = {}
        self.dividers = [
            ReplicaAssigner(c, max_wait_s=MAX_WAIT_S, refuse=self.refused.__setitem__)
            for c in self.network.message_trees
        ]
        self.answers: list[Any] = [UNANSWERED for _ in nodes]
        for divider, message_tree in zip(self.dividers, self.network.message_trees, strict=True):
            hear = divider.on_message
            message_tree.on_gathered = lambda t, b, hear=hear: hear(
                MessagesGathered(topic=t, bodies=b)
            )  # type: ignore[misc]
            message_tree.on_announced = lambda t, b, hear=hear: hear(
                DecisionAnnounced(topic=t, body=b)
            )  # type: ignore[misc]
            message_tree.on_reported = lambda t, b, r, hear=hear: hear(
                RankReported(topic=t, body=b, rank=r)
            )  # type: ignore[misc]

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


@pytest.mark.parametrize("seed", range(5))
def test_all_that_ask_get_one_division(seed: int) -> None:
    job = Job(["a", "a", "b", "b", "c"], seed)
    for rank in range(5):
        job.ask(rank, 1, shareable(4))
    job.network.deliver()
    assert len({answer.id for answer in job.answers}) == 1
    assert [list(d.assignments) for d in job.dividers] == [list(job.dividers[0].assignments)] * 5


def test_a_rank_that_has_nothing_to_share_waits_for_nobody_and_is_waited_for_by_nobody() -> None:
    job = Job(["a", "a"])
    job.ask(1, 1, shareable(4, alike=False))
    job.begin(1, 1)
    assert job.answers[1] == UNANSWERED
    job.ask(0, 1, shareable(4))
    job.network.deliver()
    assert isinstance(job.answers[0], ReplicaAssignment)
    job.begin(0, 1)
    job.ask(
        0, 2, shareable(5)
    )  # it has another structure now; rank 1 asks for nothing, and may be further
    job.begin(1, 3)
    job.wait(ASK_AGAIN_S + 1)
    assert isinstance(job.answers[0], ReplicaAssignment)


def test_a_rank_that_has_begun_without_asking_leaves_the_others_undivided() -> None:
    job = Job(["a", "a", "b"])
    for rank in range(3):
        job.ask(rank, 1, shareable(4))
    job.network.deliver()
    for rank in range(3):
        job.begin(rank, 1)
    job.ask(0, 2, shareable(5))
    job.begin(1, 2)
    job.begin(2, 2)
    job.network.deliver()
    assert job.answers[0] == UNANSWERED
    job.wait(ASK_AGAIN_S + 1)
    assert job.answers[0] is None
    assert not any(divider.assignments for divider in job.dividers)
    for rank in range(3):  # now all have to ask
        job.ask(rank, 3, shareable(5))
    job.network.deliver()
    assert all(isinstance(answer, ReplicaAssignment) for answer in job.answers)


def test_who_never_comes_is_waited_for_no_longer_than_max_wait() -> None:
    job = Job(["a", "b"])
    job.ask(0, 1, shareable(4))
    job.wait(MAX_WAIT_S)
    assert job.answers[0] == UNANSWERED
    job.wait(MAX_WAIT_S + 1, since_s=MAX_WAIT_S)
    assert job.answers[0] is None
    job.ask(1, 1, shareable(4))  # it is late
    job.wait(2 * MAX_WAIT_S + 2, since_s=MAX_WAIT_S + 1)
    assert job.answers[1] is None or job.answers[1] == UNANSWERED


def test_a_save_that_all_give_up_is_not_waited_for() -> None:
    job = Job(["a", "b"])
    job.ask(0, 1, shareable(4))
    job.dividers[0].save_given_up(CheckpointId(1, 1))
    assert job.answers[0] is None


@pytest.mark.parametrize("seed", range(60))
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


def shares_of(
    job: Job, shares: list[ReplicatedTensors], *, digests: bool
) -> dict[int, ReplicaShare]:
    (division,) = {answer.id: answer for answer in job.answers}.values()
    return {
        rank: ReplicaShare(
            structure=share.table.structure,
            assignment=division.id,
            digests=share.digests(division) if digests else None,
        )
        for rank, share in enumerate(shares)
    }


def summary(share: ReplicaShare) -> ImageShare:
    """As the rank's image is contributed with."""
    digests = None if share.digests is None else share.digests.by_group()
    return ImageShare(structure=share.structure, assignment=share.assignment, digests=digests)


def why_not(
    job: Job, step: int, shares: dict[int, ReplicaShare | None], *, deaf: int | None = None
) -> str | None:
    """Let all ranks seal an image of a step; return why they are no checkpoint, as the last rank reads it."""
    id = CheckpointId(step, 1)
    job.refused.clear()
    for rank, share in shares.items():
        if share is not None and rank != deaf:
            job.dividers[rank].sealed(id, share)
    output = {rank: summary(share) for rank, share in shares.items() if share is not None}
    if job.dividers[0].images_agree(id, output):
        assert id not in job.refused
        return None
    job.network.deliver()
    assert id in job.refused
    return job.dividers[-1].named(job.refused[id])


def test_images_count_only_where_each_rank_wrote_what_others_left_to_it() -> None:
    job = Job(["a", "b"])
    shares = [shareable(4), shareable(4)]
    for rank in range(2):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    unread = shares_of(job, shares, digests=False)
    assert "not compared" in str(why_not(job, 2, unread)), "the first save must be compared whole"
    assert not any(divider.assignments for divider in job.dividers)
    assert why_not(job, 1, shares_of(job, shares, digests=True)) is None
    assert why_not(job, 2, unread) is None
    other = ReplicaShare(structure="another structure")
    # rank 0 writes the one tensor for both
    assert "rank 0 saved other tensors" in str(why_not(job, 3, {**unread, 0: other}))
    assert why_not(job, 4, {**unread, 1: other}) is None
    undivided = ReplicaShare(structure=shares[0].table.structure)
    assert "not compared" in str(why_not(job, 5, {**unread, 0: undivided}))
    unknown = {
        rank: ReplicaShare(structure=s.structure, assignment="unknown")
        for rank, s in unread.items()
    }
    for rank in range(2):
        job.ask(rank, 6, shares[rank])
    job.network.deliver()
    assert all(divider.assignments for divider in job.dividers)
    assert "not known" in str(why_not(job, 6, unknown))
    assert not any(divider.assignments for divider in job.dividers), "all divide anew"
    assert why_not(job, 7, {0: None, 1: None}) is None


def test_a_rank_that_was_not_divided_with_the_others_is_not_compared_with_them() -> None:
    job = Job(["a", "b", "c"])
    shares = [shareable(4) for _ in range(3)]
    for rank in range(3):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    divided = shares_of(job, shares, digests=True)
    (owner,) = {int(owner) for owner in job.answers[0].owners}
    other = (owner + 1) % 3
    late = {
        **divided,
        other: ReplicaShare(structure=divided[other].structure),
    }  # it waited too long
    assert "not compared" in str(why_not(job, 1, late))


def unlike() -> tuple[Job, list[ReplicatedTensors]]:
    job = Job(["a", "b"])
    shares = [shareable(4), shareable(4)]
    for rank in range(2):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    assert why_not(job, 1, shares_of(job, shares, digests=True)) is None
    shares[1].view.sources[0].data.add_(1)
    return job, shares


def test_a_difference_ends_every_save_by_that_division_and_then_all_write_all() -> None:
    job, shares = unlike()
    first = why_not(job, 2, shares_of(job, shares, digests=True))
    assert first is not None
    assert first.startswith("model.weight on rank 0 differs from that on rank 1: ")
    assert why_not(job, 3, shares_of(job, shares, digests=False)) == first, "it was under way"
    assert not any(divider.assignments for divider in job.dividers)
    for rank in range(2):
        job.ask(rank, 4, shares[rank])
    job.network.deliver()
    for rank, share in enumerate(shares):
        assert share.written_by_others(job.answers[rank], rank) == {}
    apart = shares_of(job, shares, digests=False)
    assert why_not(job, 4, apart) is None
    assert why_not(job, 5, apart) is None


def test_a_difference_of_the_first_save_ends_that_and_then_all_write_all() -> None:
    job = Job(["a", "b"])
    shares = [shareable(4), shareable(4)]
    shares[1].view.sources[0].data.add_(1)
    for rank in range(2):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    assert "model.weight on rank 0" in str(why_not(job, 1, shares_of(job, shares, digests=True)))
    for rank in range(2):
        job.ask(rank, 2, shares[rank])
    job.network.deliver()
    assert (
        shares[0].written_by_others(job.answers[0], 0)
        == shares[1].written_by_others(job.answers[1], 1)
        == {}
    )
    assert why_not(job, 2, shares_of(job, shares, digests=False)) is None


def test_a_rank_that_cannot_say_what_it_digested_leaves_the_difference_unnamed() -> None:
    job, shares = unlike()
    output = why_not(job, 2, shares_of(job, shares, digests=True), deaf=1)
    assert output is not None
    assert output.startswith("ranks have tensors of one name and shape that are not replicas")


def test_a_rank_that_does_not_answer_holds_the_refusal_up_no_longer_than_others_wait() -> None:
    job, shares = unlike()
    root, id = job.dividers[0], CheckpointId(2, 1)
    assert not root.end_naming(id), "nothing is asked for yet"
    both = shares_of(job, shares, digests=True)
    assert not root.images_agree(id, {rank: summary(share) for rank, share in both.items()})
    assert id not in job.refused
    assert root.end_naming(id)
    assert "not replicas" in job.refused[id].text
    job.network.deliver()  # the answers come after all
    assert len(job.refused) == 1


def test_other_structures_are_shared_as_before() -> None:
    job, shares = unlike()
    why_not(job, 2, shares_of(job, shares, digests=True))
    wide = [shareable(5), shareable(5)]
    for rank in range(2):
        job.ask(rank, 3, wide[rank])
    job.network.deliver()
    left = [share.written_by_others(job.answers[rank], rank) for rank, share in enumerate(wide)]
    assert sorted(map(len, left)) == [0, 1]
