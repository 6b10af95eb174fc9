"""The events that a run writes, and that docs/metrics.md describes them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.event_lines import last_events
from tests.open_ranks import Opener, close_all
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import events

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def kinds(path: Path) -> list[str]:
    return [event["kind"] for event in last_events(path, 10_000)]


def only(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in last_events(path, 10_000) if event["kind"] == kind]


# The page --------------------------------------------------------------------------------------------


KINDS = [
    value
    for value in vars(events).values()
    if isinstance(value, type) and issubclass(value, events.Event) and value.kind
]


def members_of(kind: type[events.Event]) -> tuple[str, ...]:
    """The members of a line of this kind, without ``kind``."""
    own = (each.name for each in fields(kind) if each.name != "at_s")
    return tuple(n for name in own for n in (("step", "attempt") if name == "id" else (name,)))


def documented() -> dict[str, tuple[str, ...]]:
    """The table of kinds: the members of each."""
    table = PAGE.read_text().partition("\n### Kinds\n")[2].partition("|---|")[2]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", table, flags=re.MULTILINE)
    return {kind: tuple(re.findall(r"`(\w+)`", names)) for kind, names in rows}


def test_the_page_lists_every_kind_with_its_members() -> None:
    assert documented()
    assert documented() == {kind.kind: members_of(kind) for kind in KINDS}


def test_every_kind_of_event_has_a_name_of_its_own() -> None:
    assert len({kind.kind for kind in KINDS}) == len(KINDS)


# Several ranks ---------------------------------------------------------------------------------------


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


@pytest.mark.parametrize(
    ("name", "files"),
    [("events.jsonl", ["events.jsonl"]), ("e-{rank}.jsonl", ["e-0.jsonl", "e-1.jsonl"])],
)
def test_rank_0_writes_for_all_or_each_rank_a_file_of_its_own(
    opener: Opener, tmp_path: Path, name: str, files: list[str]
) -> None:
    both = opener.all_open(events=str(tmp_path / "logs" / name))
    handles = [
        ckpt.save(1, {"w": torch.full((4,), float(rank)), "rng": None})
        for rank, ckpt in enumerate(both)
    ]
    for handle in handles:
        handle.wait(timeout=20)
    close_all(both)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in logs] == files
    for rank, path in enumerate(logs):
        assert {e["rank"] for e in last_events(path, 99)} == {rank}
        assert {e["world_size"] for e in only(path, "opened")} == {2}
        for kind in ("save_begun", "captured"):
            assert [e["step"] for e in only(path, kind)] == [1], kind
        assert sorted(e["tier"] for e in only(path, "committed")) == ["far", "nvme"]
