"""Asking all ranks to divide: every save that asks is answered, with the same for all, or with nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.core.ranks.network import Network
from tierfall.core.image import describe, plan_layout
from tierfall.core.image.dividing import Division, Shareable, pack
from tierfall.core.ranks.ranks import Announced, Gathered, Told
from tierfall.core.scheduler.dividing import ASK_AGAIN_S, Divider
from tierfall.core.scheduler.tasks import DivisionAsked
from tierfall.core.snapshot import Share
from tierfall.core.values import CheckpointId

MAX_WAIT_S = 10.0
UNANSWERED = "unanswered"


def shareable(width: int, *, alike: bool = True) -> Shareable:
    torch.manual_seed(0)
    model = nn.Linear(width, 3, bias=False)
    view = describe({"model": model} if alike else {"x": torch.zeros(width)})
    return Shareable(view, plan_layout(view).structure)


class Job:
    """The dividers of all ranks over one network."""

    def __init__(self, nodes: list[str], seed: int = 0) -> None:
        self.network = Network(nodes, seed=seed)
        self.dividers = [Divider(c, max_wait_s=MAX_WAIT_S) for c in self.network.councils]
        self.answers: list[Any] = [UNANSWERED for _ in nodes]
        for divider, council in zip(self.dividers, self.network.councils, strict=True):
            hear = divider.hear
            council.on_gathered = lambda t, b, hear=hear: hear(Gathered(topic=t, bodies=b))  # type: ignore[misc]
            council.on_announced = lambda t, b, hear=hear: hear(Announced(topic=t, body=b))  # type: ignore[misc]
            council.on_told = lambda t, b, r, hear=hear: hear(Told(topic=t, body=b, rank=r))  # type: ignore[misc]

    def ask(self, rank: int, step: int, share: Shareable) -> None:
        def answer(division: Division | None) -> None:
            self.answers[rank] = division

        self.answers[rank] = UNANSWERED
        asked = DivisionAsked(id=CheckpointId(step, 1), shareable=share, answer=answer)
        self.dividers[rank].ask(asked)

    def begin(self, rank: int, step: int) -> None:
        self.dividers[rank].has_begun(CheckpointId(step, 1))

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
    assert [list(d.divisions) for d in job.dividers] == [list(job.dividers[0].divisions)] * 5


def test_a_rank_that_has_nothing_to_share_waits_for_nobody_and_is_waited_for_by_nobody() -> None:
    job = Job(["a", "a"])
    job.ask(1, 1, shareable(4, alike=False))
    job.begin(1, 1)
    assert job.answers[1] == UNANSWERED
    job.ask(0, 1, shareable(4))
    job.network.deliver()
    assert isinstance(job.answers[0], Division)
    job.begin(0, 1)
    job.ask(
        0, 2, shareable(5)
    )  # it has another structure now; rank 1 asks for nothing, and may be further
    job.begin(1, 3)
    job.wait(ASK_AGAIN_S + 1)
    assert isinstance(job.answers[0], Division)


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
    assert not any(divider.divisions for divider in job.dividers)
    for rank in range(3):  # now all have to ask
        job.ask(rank, 3, shareable(5))
    job.network.deliver()
    assert all(isinstance(answer, Division) for answer in job.answers)


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
    job.dividers[0].gone(CheckpointId(1, 1))
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
        waiting = [rank for rank in asking if job.dividers[rank]._standing is None]
        assert all(job.answers[rank] != UNANSWERED for rank in waiting)
        made = [job.answers[rank] for rank in waiting]
        assert len({answer and answer.id for answer in made}) <= 1
        for rank in ranks:
            job.begin(rank, step)


def shares_of(job: Job, shares: list[Shareable], *, digests: bool) -> dict[int, Any]:
    (division,) = {answer.id: answer for answer in job.answers}.values()
    return {
        rank: Share(
            structure=share.table.structure,
            division=division.id,
            digests=pack(share.digests(division)) if digests else None,
        ).to_json()
        for rank, share in enumerate(shares)
    }


def test_images_count_only_where_each_rank_wrote_what_others_left_to_it() -> None:
    job = Job(["a", "b"])
    shares = [shareable(4), shareable(4)]
    for rank in range(2):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    root, id = job.dividers[0], CheckpointId(1, 1)
    unseen = shares_of(job, shares, digests=False)
    assert "never compared" in root.why_not(id, unseen)[0]  # type: ignore[index]
    job.network.deliver()
    assert not any(divider.divisions for divider in job.dividers)
    assert root.why_not(id, shares_of(job, shares, digests=True)) is None
    assert root.why_not(CheckpointId(2, 1), unseen) is None  # compared once
    other = {
        **unseen,
        0: ["another structure", None, None],
    }  # rank 0 writes the one tensor for both
    assert "rank 0 saved other tensors" in root.why_not(CheckpointId(3, 1), other)[0]  # type: ignore[index]
    left_to_it = {**unseen, 1: ["another structure", None, None]}
    assert root.why_not(CheckpointId(3, 1), left_to_it) is None
    unknown = {rank: [share[0], "unknown", None] for rank, share in unseen.items()}
    for rank in range(2):
        job.ask(rank, 4, shares[rank])
    job.network.deliver()
    assert all(divider.divisions for divider in job.dividers)
    assert "not known" in root.why_not(CheckpointId(4, 1), unknown)[0]  # type: ignore[index]
    job.network.deliver()
    assert not any(divider.divisions for divider in job.dividers), "all divide anew"
    assert root.why_not(CheckpointId(5, 1), {0: None, 1: None}) is None


def test_a_difference_ends_every_save_by_that_division() -> None:
    job = Job(["a", "b"])
    shares = [shareable(4), shareable(4)]
    shares[1]._view.sources[0].data.add_(1)
    for rank in range(2):
        job.ask(rank, 1, shares[rank])
    job.network.deliver()
    root = job.dividers[0]
    first = root.why_not(CheckpointId(1, 1), shares_of(job, shares, digests=True))
    later = root.why_not(CheckpointId(2, 1), shares_of(job, shares, digests=False))
    assert first == later
    assert first is not None
    text = job.dividers[1].named(*first)
    assert text.startswith("model.weight is on rank 0 not what it is on rank 1")
