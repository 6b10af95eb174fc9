"""What each tier keeps, what it deletes and when, and what no rule deletes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.kit import (
    IMAGE,
    Place,
    blank,
    flip,
    save_steps,
    state_of,
    step_in,
    wait_until,
)
from tierfall.errors import StepError, TierfallError

SOON_S = 10.0
Save = dict[str, Any]


def kept(place: Place, retain: dict[str, Any], *saves: Save) -> list[int]:
    """The steps that a tier with these rules has after these saves: step 1, 2 and so on unless ``step`` says else."""
    place.config(disk={"retain": retain})
    with place.open() as ckpt:
        for number, words in enumerate(saves, 1):
            step = words.pop("step", number)
            ckpt.save(step, state_of(step), block=True, **words)
        ckpt.drain()
        ckpt.prune()
    return place.steps()


def steps(*numbers: int) -> list[Save]:
    return [{"step": number} for number in numbers]


def losses(*values: object) -> list[Save]:
    return [{} if value is None else {"metrics": {"loss": value}} for value in values]


def settle(place: Place, *wanted: int, tier: str = "disk") -> None:
    """Wait until a tier has these steps and no others."""

    def found() -> list[int]:
        return [int(folder.name[5:13]) for folder in place.folders(tier)]

    wait_until(lambda: found() == list(wanted), f"{tier} has {wanted}", SOON_S)


# The rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retain", "saved", "wanted"),
    [
        ({}, range(1, 13), [*range(1, 13)]),
        ({"last": 3}, range(1, 8), [5, 6, 7]),
        # the largest number is the newest, whatever its name sorts as
        ({"last": 2}, (9, 10, 99_999_999, 100_000_000, 10**17), [100_000_000, 10**17]),
        # the first at or after each multiple, and step 0
        (
            {"every": 100, "last": 1},
            (0, 40, 90, 101, 130, 199, 200, 210, 330, 390, 401),
            [0, 101, 200, 330, 401],
        ),
        ({"every": "36500d", "last": 1}, (1, 2, 3, 4), [1, 4]),
    ],
    ids=["no rule", "last", "large numbers", "every of steps", "every of a time"],
)
def test_last_and_every_keep_by_number_and_time(
    place: Place, retain: dict[str, Any], saved: Sequence[int], wanted: list[int]
) -> None:
    assert kept(place, retain, *steps(*saved)) == wanted
    assert place.cli("latest").out == f"{wanted[-1]}@1\n"


@pytest.mark.parametrize(
    ("rule", "values", "wanted"),
    [
        ({"metric": "loss"}, (3.0, 1.0, 2.0, 4.0), [2, 4]),
        ({"metric": "loss", "mode": "max"}, (3.0, 5.0, 2.0, 4.0), [2, 4]),
        ({"metric": "loss", "count": 2}, (3.0, 1.0, 2.0, 4.0, 5.0), [2, 3, 5]),
        ({"metric": "loss"}, (1.0, 1.0, 2.0), [2, 3]),  # of equal ones the newer
        ({"metric": "loss"}, (2.0, math.nan, None, 3.0), [1, 4]),
        ({"metric": "loss"}, (2, torch.tensor(1.0), 3), [2, 3]),
        ({"metric": "loss"}, (-math.inf, 1.0, 2.0), [1, 3]),
    ],
    ids=["min", "max", "two", "equal", "nan and none", "int and tensor", "inf"],
)
def test_best_keeps_the_best_by_a_metric(
    place: Place, rule: dict[str, Any], values: tuple[object, ...], wanted: list[int]
) -> None:
    assert kept(place, {"last": 1, "best": rule}, *losses(*values)) == wanted


@pytest.mark.parametrize(("tags", "wanted"), [(["a", "c"], [1, 2, 5]), (True, [1, 2, 4, 5])])
def test_tags_keep_what_has_one_of_them_and_true_what_has_any(
    place: Place, tags: object, wanted: list[int]
) -> None:
    saved: list[Save] = [{"tags": ["a"]}, {"tags": ["b", "c"]}, {}, {"tags": ["d"]}, {}]
    assert kept(place, {"last": 1, "tags": tags}, *saved) == wanted


def test_for_deletes_what_is_older_and_never_the_last_two(place: Place) -> None:
    """A trainer does so by itself, though nothing is saved any more."""
    place.config(disk={"retain": {"for": "1s"}})
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2, 3, 4)
        assert [c.step for c in ckpt.checkpoints()] == [1, 2, 3, 4]
        settle(place, 3, 4)


def test_a_checkpoint_that_any_rule_keeps_is_kept(place: Place) -> None:
    rules = {"last": 1, "every": 4, "best": {"metric": "loss"}, "tags": ["keep"]}
    saved: list[Save] = [{"metrics": {"loss": 9.0 - step}} for step in range(1, 8)]
    saved[1]["metrics"] = {"loss": 0.0}
    saved[2]["tags"] = ["keep"]
    assert kept(place, rules, *saved) == [2, 3, 4, 7]


def test_metrics_and_tags_of_an_earlier_start_count(place: Place) -> None:
    place.config(disk={"retain": {"last": 1, "best": {"metric": "loss"}, "tags": ["t"]}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), metrics={"loss": 0.1}, block=True)
        ckpt.save(2, state_of(2), metrics={"loss": 0.5}, tags=["t"], block=True)
    with place.open() as ckpt:
        ckpt.restore(blank())
        for step in (3, 4):
            ckpt.save(step, state_of(step), metrics={"loss": 0.9}, block=True)
        settle(place, 1, 2, 4)


def test_a_metric_of_best_that_no_step_has_is_reported_once_with_the_nearest(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.config(disk={"retain": {"last": 1, "best": {"metric": "los"}}})
    with place.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), metrics={"loss": 1.0}, block=True)
        wait_until(lambda: "los" in caplog.text, "it is logged")
    said = [r.getMessage() for r in caplog.records if "loss" in r.getMessage()]
    assert len(said) == 1
    assert any("loss" in note for note in place.json("prune", "--dry-run")["notes"])


def test_each_tier_has_its_own_rules(place: Place) -> None:
    place.config(a={"retain": {"last": 1}}, b={"retain": {"last": 3}, "flush": {"every": 2}}, c={})
    with place.open() as ckpt:
        save_steps(ckpt, *range(1, 9))
        ckpt.drain()
    settle(place, 8, tier="a")
    settle(place, 4, 6, 8, tier="b")
    settle(place, *range(1, 9), tier="c")


# Pins ------------------------------------------------------------------------------------------------


def test_a_pin_outlives_rules_and_starts_until_it_is_removed(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}}, pfs={"retain": {"last": 1}})
    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            ckpt.pin(step)
        ckpt.save(3, state_of(3), block=True)
    with place.open() as ckpt:
        ckpt.restore(blank())
        ckpt.save(4, state_of(4), block=True)
        ckpt.drain()
        assert [c.step for c in ckpt.checkpoints() if c.pinned] == [1, 2]
        for tier in ("disk", "pfs"):
            settle(place, 1, 2, 4, tier=tier)
        ckpt.unpin(1)  # deleted at once: no save is needed
        for tier in ("disk", "pfs"):
            settle(place, 2, 4, tier=tier)
    place.cli("unpin", "2")
    place.cli("prune")
    assert place.steps("disk") == place.steps("pfs") == [4]


def test_a_tag_is_added_and_removed_later_also_one_of_the_save(place: Place) -> None:
    place.config(disk={"retain": {"last": 1, "tags": True}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), tags=["old", "best"], block=True)
        ckpt.save(2, state_of(2), tags=["old"], block=True)
        ckpt.untag(1, "old")
        ckpt.untag(2, "old")
        ckpt.tag(2, "released")
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain()
        found = {c.step: set(c.tags) for c in ckpt.checkpoints()}
        assert found == {1: {"best"}, 2: {"released"}, 3: set()}
    place.cli("untag", "best", "1")
    place.cli("tag", "old", "1")
    assert place.json("show", "1")["tags"] == ["old"], "a tag of the save comes back"
    place.cli("untag", "old", "1")
    place.cli("tag", "seen", "3")
    place.cli("prune")
    with place.open() as ckpt:
        ckpt.restore(blank())
        ckpt.save(4, state_of(4), block=True)
        settle(place, 2, 3, 4)


def test_pins_of_several_processes_at_once_are_all_kept(place: Place) -> None:
    place.config(disk={"retain": {"last": 4}})
    with place.open() as ckpt:
        save_steps(ckpt, *range(1, 5))
        commands = [place.begin("pin", str(step)) for step in (1, 2)]
        ckpt.pin(3)
        for command in commands:
            answer = command.end()
            assert answer.code == 0, answer.err
        ckpt.pin(4)
    pinned = [c["step"] for c in place.json("ls")["checkpoints"] if c["pinned"]]
    assert pinned == [1, 2, 3, 4]
    with place.open() as ckpt:
        ckpt.restore(blank())
        save_steps(ckpt, *range(5, 10))
    assert place.steps() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_a_pinned_step_is_not_deleted_by_hand_and_the_last_one_only_if_asked_twice(
    place: Place,
) -> None:
    place.config()
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        ckpt.pin(1)
        with pytest.raises(StepError, match="pinned"):
            ckpt.delete(1)
        ckpt.unpin(1)
        ckpt.delete(1)
        with pytest.raises((StepError, TierfallError), match="even_the_last"):
            ckpt.delete(2)
        ckpt.delete(2, even_the_last=True)
        assert ckpt.checkpoints() == []
    assert place.folders() == []
    assert not [p for p in (place.root / "disk/run").rglob("*.safetensors")]


@pytest.mark.parametrize("call", ["pin", "unpin", "delete"])
def test_a_step_that_is_not_there_is_named(place: Place, call: str) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        with pytest.raises(StepError, match="7"):
            getattr(ckpt, call)(7)


# What no rule deletes --------------------------------------------------------------------------------


def test_the_newest_that_survives_each_loss_stays_whatever_the_rules_say(place: Place) -> None:
    """Step 2 alone survives the loss of the node: step 3 is on a disk of this node."""
    place.config(
        disk={"retain": {"last": 1}},
        pfs={"shared": True, "flush": {"every": 2}, "retain": {"tags": ["never"]}},
    )
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2, 3)
        ckpt.drain()
        settle(place, 3)
        settle(place, 2, tier="pfs")
        reasons = {(d.checkpoint.step, d.tier): d.reason for d in ckpt.prune(dry_run=True)}
    assert "node" in reasons[2, "pfs"]


def test_a_start_that_has_restored_nothing_deletes_nothing(place: Place) -> None:
    place.config()
    place.save(1, 2, 3)
    place.config(disk={"retain": {"last": 1}})
    with place.open() as ckpt:
        assert tierfall.load(place.yaml)
        ckpt.drain()
    assert place.steps() == [1, 2, 3]
    with place.open() as ckpt:
        ckpt.restore(blank())
        settle(place, 3)


def test_files_of_others_are_never_touched(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}})
    place.save(1)
    run = place.root / "disk" / "run"
    strangers = {
        run / "notes.txt": "mine",
        run / "step-x" / "weights.bin": "mine",
        run / "step-00000009" / "weights.bin": "mine",
        run / "step-00000001-a0001" / "mine.txt": "mine",
        place.root / "disk" / "another" / "file": "mine",
    }
    for path, text in strangers.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with place.open() as ckpt:
        ckpt.restore(blank())
        save_steps(ckpt, 2, 3)
        settle(place, 3)
        ckpt.delete(3, even_the_last=True)
    place.cli("rm", "--all", "--run", "run", input="run\n")
    assert {path: path.read_text() for path in strangers} == strangers


def test_a_damaged_newest_is_no_reason_to_delete_an_older_one(place: Place) -> None:
    """Of an earlier start: it is read before anything is deleted because of it."""
    place.config(disk={"retain": {"last": 2}}, pfs={"flush": {"every": 100}})
    place.save(1, 2)
    flip(place.folders()[1] / IMAGE)
    place.config(disk={"retain": {"last": 1}})
    with place.open() as ckpt:
        report = ckpt.restore(blank(), step=1)
        assert report is not None
        ckpt.drain()
    assert [f.name[:13] for f in place.folders()] == ["step-00000001", "step-00000002"]
    report = place.restored()
    assert (report.step, report.fallbacks[0].id is not None) == (1, True)


def test_a_purge_of_the_newest_is_found_before_older_ones_go(place: Place) -> None:
    """A person, or a cleaner of a scratch file system, removed an image in mid-run."""
    place.config(host={"capacity": "200KiB"}, disk={"retain": {"last": 2}})
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        (place.folders()[1] / IMAGE).unlink()
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain()
        wait_until(
            lambda: any(copy.damage for copy in ckpt.checkpoints()[1].copies.values()),
            "it counts as damaged",
        )
        assert step_in(tierfall.load(place.folders()[0])) == 1


# Prune -----------------------------------------------------------------------------------------------
