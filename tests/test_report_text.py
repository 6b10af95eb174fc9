"""What print and a notebook show of reports, handles and a run: lines that a person reads."""

from __future__ import annotations

import pytest

from tierfall.core.types.view import PeerSurvival, SurvivalChance
from tierfall.telemetry.reports import describe_peer_survival


def chance(losses: int, probability: float, *, exact: bool = True) -> SurvivalChance:
    return SurvivalChance(losses=losses, probability=probability, exact=exact)


@pytest.mark.parametrize(
    ("certain", "chances", "text"),
    [
        (1, [chance(1, 1), chance(2, 14 / 15), chance(3, 0.8)],
         "the loss of any 1 node; of 2 with 93.3%, of 3 with 80%"),
        (2, [chance(1, 1), chance(2, 1), chance(3, 1 - 1e-15)],
         "the loss of any 2 nodes; of 3 with 99.9%"),
        (1, [chance(1, 1), chance(2, 0.61, exact=False), chance(3, 0, exact=False)],
         "the loss of any 1 node; of 2 with at least 61%"),
        (1, [chance(1, 1), chance(2, 0)], "the loss of any 1 node"),
        (0, [chance(1, 0)], "no loss of a node for certain"),
    ],
)  # fmt: skip
def test_losses_of_nodes_are_never_rounded_up(
    certain: int, chances: list[SurvivalChance], text: str
) -> None:
    found = PeerSurvival(
        tier="peers", step=1200, attempt=3, certain=certain, chances=tuple(chances)
    )
    assert describe_peer_survival(found) == f"peers: 1200@3 survives {text}"
