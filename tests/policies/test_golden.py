"""What policies decide, case by case, as text that a person can check.

After a wanted change: ``TIERFALL_GOLDEN=write pytest tests/policies``, and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.policies.views import answered

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "name",
    [
        "retention",
        "eviction",
        "superseding",
        "relief",
        "pressure",
        "yielding",
        "guard",
        "flush",
        "cadence",
        "drain",
        "loss_bound",
    ],
)
def test_decisions_and_reasons_are_as_written(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    messages = path.read_text()
    now = answered(messages)
    if os.environ.get("TIERFALL_GOLDEN") == "write":
        path.write_text(now)
    assert now == messages


def test_every_case_asks_and_is_answered() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        for case in path.read_text().split("\n## ")[1:]:
            assert case.count("\nask ") >= 1, f"{path.name}: {case.splitlines()[0]} asks nothing"
            assert case.count("\n-> ") >= case.count("\nask "), f"{path.name}: {case}"
