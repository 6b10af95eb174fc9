"""The events that a run writes, and that docs/metrics.md describes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.event_lines import last_events
from tests.open_ranks import Opener, close_all
from tests.simulation.world import IMAGE, World, file_rules
from tests.steps import blank, state_of
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import events
from tierfall.errors import CaptureError, ConfigError, RestoreError, StepError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
MakeConfig = Callable[..., dict[str, Any]]


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


def test_a_line_has_the_members_that_the_page_names_and_no_others(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    with tierfall.open(make_config(disk={"retain": {"last": 1}}, events=str(log))) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.restore(blank())
    general = re.findall(r"^\| `(\w+)` \|", PAGE.read_text().partition("### What each line")[2], re.M)
    general = general[: general.index("kind") + 1]
    seen = last_events(log, 10_000)
    for event in seen:
        assert tuple(event) == (*general, *documented()[event["kind"]])
        assert (event["format"], event["run"], event["rank"]) == (1, "run", 0)
    assert [event["wall_time_s"] for event in seen] == sorted(e["wall_time_s"] for e in seen)


# A life ----------------------------------------------------------------------------------------------


def test_a_run_says_what_became_of_each_save(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "run.jsonl"
    config = make_config(fast={"retain": {"last": 1}}, slow={"flush": {"every": 2}})
    config["events"] = {"path": str(log)}
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state_of(step), block=True)
        report = ckpt.restore(blank(), tier="slow")
        assert report is not None
    found = Counter(kinds(log))
    assert (found["opened"], found["closed"], found["restored"]) == (1, 1, 1)
    assert (found["save_begun"], found["captured"]) == (4, 4)
    assert Counter(e["tier"] for e in only(log, "committed")) == {"fast": 4, "slow": 2}
    assert {tuple(e["tiers"]) for e in only(log, "save_begun")} == {("fast",), ("fast", "slow")}
    assert [e["step"] for e in only(log, "dropped")] == [1, 2, 3]
    assert {e["reason"] for e in only(log, "dropped")} == {"no rule keeps it (last 1)"}
    (restored,) = only(log, "restored")
    assert restored["sources"] == {"slow": report.bytes}
    for done in only(log, "flush_done"):
        assert sum(done["sources"].values()) == done["bytes"] > 80_000
    assert all(e["seconds"] >= 0 for e in only(log, "committed"))


def test_what_goes_wrong_is_reported(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with tierfall.open(make_config(host={"capacity": "1MiB"}, events=str(log))) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        with pytest.raises(CaptureError):
            ckpt.save(2, {"w": object()})
        with pytest.raises(StepError):
            ckpt.save(1, state_of(1))
        with pytest.raises(RestoreError):
            ckpt.restore(blank(), step=99)
    (ended,) = only(log, "save_ended")
    assert (ended["step"], ended["outcome"]) == (2, "failed")
    assert "state" in ended["reason"]
    (error,) = only(log, "error")
    assert error["doing"] == "restore"
    assert "step 99" in error["reason"]


def test_a_later_start_goes_on_in_the_same_file(make_config: MakeConfig, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    for step in (1, 2):
        with tierfall.open(make_config(events=str(tmp_path / "{run}.jsonl"))) as ckpt:
            ckpt.restore(blank())
            ckpt.save(step, state_of(step))
    assert [e["attempt"] for e in only(log, "opened")] == [1, 2]
    assert [(e["step"], e["attempt"]) for e in only(log, "committed")] == [(1, 1), (2, 2)]


def test_a_log_that_cannot_be_written_fails_nothing_and_is_counted(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with tierfall.open(make_config(events=str(tmp_path / "file" / "events.jsonl"))) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt._journal.log.close(5.0)  # type: ignore[union-attr]
        lost = ckpt.statistics().lost_events
        assert lost >= 6, "opened, begun, captured, flush begun and done, committed"
        assert ckpt.restore(blank()) is not None


# On the virtual clock --------------------------------------------------------------------------------


def test_an_event_has_the_time_of_the_clock() -> None:
    world = World([file_rules("nvme")])
    world.now_s = 1_000.0
    region, _ = world.ask_for_region(1)
    snapshot = world.begin(1, region)
    world.step()
    world.now_s = 1_007.5
    world.seal(snapshot)
    world.settle()
    life = world.lives[-1]
    begun, captured = (
        next(e for e in life.events if isinstance(e, kind))
        for kind in (events.SaveBegun, events.Captured)
    )
    assert (begun.at_s, captured.at_s) == (1_000.0, 1_007.5)
    assert isinstance(captured, events.Captured)
    assert captured.seconds == 7.5
    assert captured.bytes == IMAGE
    life.check()


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


# The file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "place", "output"),
    [
        ({"path": "e.jsonl", "max": "1KiB"}, "events.max", "64 KiB or more"),
        ({"path": "e-{host}.jsonl"}, "events.path", '"{host}" is not a placeholder'),
        ("s3://bucket/events.jsonl", "events.path", "is an address; expected a file"),
        ({"max": "1MiB"}, "events.path", "missing"),
        ({"path": "e.jsonl", "maximum": 1}, "events.maximum", 'did you mean "max"'),
        (7, "events", "expected"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(
    make_config: MakeConfig, value: Any, place: str, output: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tierfall.open({**make_config(), "events": value})
    assert place in str(caught.value)
    assert output in str(caught.value)
