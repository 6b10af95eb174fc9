"""``drain``: images that a dead trainer left in memory become durable, or stay there with a report; fencing holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cli_kit import Cli

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import state_of

MakeCli = Callable[..., Cli]


def test_a_tier_that_refuses_is_tried_until_the_deadline(
    make_cli: MakeCli, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(monkeypatch)
    cli = make_cli(max_wait="0.3s")
    cli.configure({**cli.config, "tiers": [cli.config["tiers"][0], store.tier()]})
    store.refuse = lambda call, key: PermissionError() if "step-00000002" in key else None
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2))
    assert store.steps() == [1]
    store.heal_after_refusals(5)
    cli("drain", "--deadline", "60s")
    assert store.steps() == [1, 2]
