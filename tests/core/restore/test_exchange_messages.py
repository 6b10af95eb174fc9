"""The messages of ranks before an exchange: small, and the same to all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from tierfall.core.restore.exchange.assign import RequestedRanges
from tierfall.core.restore.exchange.messages import (
    ExchangeDecision,
    ExchangeRequest,
    NextPhase,
    NumberRanges,
    decide,
    holders_of,
)

SEES_ALL = {2: range(4)}


def answer(*asks: ExchangeRequest) -> ExchangeDecision:
    """What all ranks hear once each has said its own."""
    return decide(carried(asks), place_of, "name")


def place_of(tier: int, rank: int) -> int | None:
    """Each rank is on a node of its own; all see tier 2."""
    return None if tier == 2 else rank


def carried(asks: Sequence[ExchangeRequest]) -> dict[int, ExchangeRequest]:
    """As they come to rank 0."""
    output = [json.loads(json.dumps(ask.to_json())) for ask in asks]
    return {rank: ExchangeRequest.from_json(each, rank=rank) for rank, each in enumerate(output)}


def own(rank: int, sees: Mapping[int, Iterable[int]] | None) -> ExchangeRequest:
    requested = {rank: RequestedRanges(64, (0, 100))}
    return ExchangeRequest(
        requested=requested, alone=True, readable=None if sees is None else ranges(sees)
    )


def ranges(sees: Mapping[int, Iterable[int]]) -> dict[int, NumberRanges]:
    return {tier: NumberRanges.of(images) for tier, images in sees.items()}


def test_ranks_that_read_their_own_images_alone_need_nobody() -> None:
    output = answer(*(own(rank, SEES_ALL) for rank in range(4)))
    assert output.next is NextPhase.LOCAL
    assert output.groups == ()
    assert (
        answer(own(0, {0: [0], 1: [0], 2: [0, 1]}), own(1, {0: [1], 1: [1], 2: [0, 1]})).next
        is NextPhase.LOCAL
    )


def test_an_image_that_only_another_rank_has_on_some_tier_calls_for_an_exchange() -> None:
    output = answer(own(0, {2: [0, 1]}), own(1, {1: [0], 2: [0, 1]}))
    assert output.next is NextPhase.CHUNKS
    assert output.seen is not None
    assert holders_of(output.seen) == {0: [(1, (1,)), (2, (0, 1))], 1: [(2, (0, 1))]}


def test_a_second_copy_on_another_node_calls_for_one_too() -> None:
    """Should the one be damaged, the other is read."""
    output = answer(own(0, {1: [0, 1]}), own(1, {1: [0, 1]}))
    assert output.next is NextPhase.CHUNKS
    assert answer(own(0, {2: [0, 1]}), own(1, {2: [0, 1]})).next is NextPhase.LOCAL


def test_headers_come_before_what_others_have_planned_already() -> None:
    planning = ExchangeRequest(
        requested={i: RequestedRanges(0) for i in range(2)},
        planning=True,
        readable=ranges(SEES_ALL),
    )
    output = answer(own(0, SEES_ALL), planning)
    assert output.next is NextPhase.HEADERS
    assert [(g.ranks, dict(g.requested)) for g in output.rank_groups()] == [
        ((1,), {0: RequestedRanges(0), 1: RequestedRanges(0)})
    ]
