"""What may not be read is not damaged.

Damage is a digest or a size that differs, or the store's own answer that a key is absent while the tier's id can be
read. Whatever else a store says, on whatever medium, nothing is known of the checkpoint: no restore passes over it in
silence, and nothing deletes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all
from tests.shelf import Shelf
from tests.steps import blank, save_steps, state_of, step_in, steps_on, wait_until
from tierfall.backends import toolkit
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.errors import RestoreError
from tierfall.run.checkpointer import Checkpointer

MakeConfig = Callable[..., dict[str, Any]]
FILES = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "commit.json")
IGNORE = "unreachable='ignore'"


@pytest.fixture
def config(make_config: MakeConfig, shelf: Shelf, impatient: None) -> dict[str, Any]:
    """Host memory, and a store that keeps the newest checkpoint alone."""
    config = make_config()
    config["tiers"][1] = {
        "name": "store",
        "kind": "object",
        "url": "shelf://a",
        "retain": {"last": 1},
    }
    return config


def two_steps(config: dict[str, Any], *, retain: int = 2) -> None:
    """Save steps 1 and 2, which stay."""
    kept = {**config["tiers"][1], "retain": {"last": retain}}
    save_steps(
        {**config, "tiers": [config["tiers"][0], kept, *config["tiers"][2:]]},
        1,
        2,
        unreachable="ignore",
    )


# Whatever the store says -------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["commit.json", "rank-00000-of-00001.json"])
def test_no_rule_deletes_what_a_listing_could_not_read(
    file: str, config: dict[str, Any], shelf: Shelf
) -> None:
    """The program goes on with a step that it names, and never tries the other one."""
    two_steps(config)
    shelf.hidden = (f"step-00000002-a0001/{file}",)
    shelf.refused = dict.fromkeys(shelf.hidden, toolkit.AccessDeniedError)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), step=1)
        for step in (3, 4):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: shelf.steps() == [2, 4], "the rules delete what could be read")


def test_a_copy_that_is_found_where_it_is_owed_counts_once_it_was_read(
    config: dict[str, Any], shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """The store does not answer when the run is opened, and a bit of its newest copy has flipped."""
    config["tiers"][0]["on_close"] = "keep"
    two_steps(config)
    image = next(key for key in shelf.of_step(2) if key.endswith(FILES[0]))
    shelf.values[image] = shelf.values[image][:-1] + bytes([shelf.values[image][-1] ^ 1])
    shelf.refused = {"run/latest": toolkit.UnreachableError}
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state, unreachable="ignore")
        assert step_in(state) == 2
        shelf.refused = {}
        wait_until(lambda: "2@1 is damaged" in caplog.text, "it is read")
        ckpt.drain(10.0)
        assert shelf.steps() == [1, 2]
    assert step_in(tierfall.load(config, step=1)) == 1


# What is damage -----------------------------------------------------------------------------------


def test_absent_is_damage_only_while_the_id_of_the_tier_can_be_read(
    config: dict[str, Any], shelf: Shelf
) -> None:
    two_steps(config)
    image = next(key for key in shelf.of_step(2) if key.endswith(FILES[0]))
    kept = shelf.values.pop(image)
    shelf.refused = {"tier.json": toolkit.AccessDeniedError}
    with pytest.raises(RestoreError, match=r"2@1.*tier\.json.*refused"):
        tierfall.load(config)
    shelf.refused = {}
    shelf.absent = ("tier.json",)
    with pytest.raises(RestoreError, match=r"2@1.*tier\.json.*it is not there either"):
        tierfall.load(config)
    shelf.absent = ()
    assert step_in(tierfall.load(config)) == 1
    shelf.values[image] = kept[:-1]  # another size
    assert step_in(tierfall.load(config)) == 1
    shelf.values[image] = kept[:-1] + bytes([kept[-1] ^ 1])  # another digest
    assert step_in(tierfall.load(config)) == 1


def test_what_has_no_record_is_not_collected_while_the_id_of_the_tier_cannot_be_read(
    config: dict[str, Any], shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    two_steps(config)
    del shelf.values["run/step-00000001-a0001/commit.json"]
    rest = shelf.of_step(1)
    shelf.refused = {"tier.json": toolkit.AccessDeniedError}
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        wait_until(lambda: "could not delete 1@1: " in caplog.text, "it is tried")
    assert shelf.of_step(1) == rest
    shelf.refused = {}
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        wait_until(lambda: not shelf.of_step(1), "it is no checkpoint")


# Several ranks ---------------------------------------------------------------------------------------


def test_what_one_rank_could_not_read_all_ranks_keep(ranks: list[Ranks], tmp_path: Path) -> None:
    """Each node has a disk of its own, with its ranks' part."""
    places = [tmp_path / str(rank) for rank in range(2)]

    def open_one(ranks: list[Ranks], rank: int) -> Checkpointer:
        tiers = [
            {"name": "host", "kind": "host", "folder": str(places[rank] / "memory")},
            {
                "name": "disk",
                "kind": "file",
                "path": str(places[rank] / "disk"),
                "retain": {"last": 2},
            },
        ]
        config = {"run": "run", "max_wait": "20s", "tiers": tiers}
        return Checkpointer(Config.model_validate(config), ranks=ranks[rank])

    def save_on_both(step: int) -> None:
        handles = [ckpt.save(step, state_of(step)) for ckpt in both]
        on_all([partial(handle.wait, "disk") for handle in handles])

    def folders(step: int) -> list[int]:
        found = [place / "disk" / "run" / f"step-{step:08d}-a0001" for place in places]
        return [len(list(folder.glob("*"))) for folder in found]

    both = on_all([partial(open_one, ranks, rank) for rank in range(2)])
    save_on_both(1)
    save_on_both(2)
    close_all(both)
    there = folders(2)
    path = places[1] / "disk" / "run" / "step-00000002-a0001" / "commit.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with network(["a", "b"]) as again:
        both = on_all([partial(open_one, again, rank) for rank in range(2)])
        for error in on_all([partial(_refusal, ckpt) for ckpt in both]):
            assert "2@1" in error
            assert IGNORE in error
        states = [blank(), blank()]
        reports = on_all(
            [
                partial(ckpt.restore, state, unreachable="ignore")
                for ckpt, state in zip(both, states, strict=True)
            ]
        )
        assert [report.step for report in reports] == [1, 1]
        assert [step_in(state) for state in states] == [1, 1]
        for step in (3, 4, 5):
            save_on_both(step)
        on_all([partial(ckpt.drain, 10.0) for ckpt in both])
        assert folders(1) == [0, 0], "the rules apply to what could be read"
        assert folders(2) == there
        close_all(both)


def _refusal(ckpt: Checkpointer) -> str:
    with pytest.raises(RestoreError) as refused:
        ckpt.restore(blank())
    return str(refused.value)


def test_a_copy_is_owed_until_its_only_source_can_be_read(
    config: dict[str, Any], shelf: Shelf, tmp_path: Path
) -> None:
    """Before, the slower tier was never given it."""
    slow = {"name": "slow", "kind": "file", "path": str(tmp_path / "slow")}
    two_steps(config)
    config["tiers"].append(slow)
    shelf.refused = {f"step-00000002-a0001/{FILES[0]}": toolkit.AccessDeniedError}
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), step=1)
        wait_until(lambda: shelf.asked[f"run/step-00000002-a0001/{FILES[0]}"] > 3, "it is tried")
        owed = {info.step: info.owed for info in ckpt.checkpoints()}
        assert owed[2] == ("slow",)
        shelf.refused = {}
        wait_until(lambda: 2 in steps_on(tmp_path / "slow"), "it is copied")


def test_a_restore_that_ended_keeps_what_it_could_not_read_from_the_rules(
    config: dict[str, Any], shelf: Shelf
) -> None:
    """The program goes on with a step that it names."""
    two_steps(config)
    shelf.refused = {"step-00000002-a0001/rank": toolkit.AccessDeniedError}
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match=IGNORE):
            ckpt.restore(blank())
        ckpt.restore(blank(), step=1)
        for step in (3, 4):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: shelf.steps() == [2, 4], "the rules delete what could be read")
