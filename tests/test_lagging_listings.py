"""A listing decides nothing: one that lags behind leaves out what is there.

What ``latest``, the lineage or a commit record names is asked for by its key. If that is not possible, a restore
raises. No rule deletes anything in a start whose listing left out what is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests.shelf import Shelf
from tests.steps import blank, save_steps, state_of, step_in, wait_until
from tierfall.backends import toolkit
from tierfall.cli.app import app
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, shelf: Shelf) -> dict[str, Any]:
    config = make_config()
    config["tiers"][1] = {"name": "store", "kind": "object", "url": "shelf://a"}
    return config


def retaining(config: dict[str, Any], last: int) -> dict[str, Any]:
    host, stored = config["tiers"]
    return {**config, "tiers": [host, {**stored, "retain": {"last": last}}]}


@pytest.mark.parametrize("hidden", ["step-", "run/"])
def test_rules_apply_again_once_the_listing_has_caught_up(
    hidden: str, config: dict[str, Any], shelf: Shelf
) -> None:
    save_steps(config, 1, 2, 3)
    shelf.hidden = (hidden,)
    assert step_in(tierfall.load(config)) == 3
    with tierfall.open(retaining(config, 1)) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.fallbacks) == (3, ())
        copies = [copy for info in ckpt.checkpoints() for copy in info.copies.values()]
        assert copies
        assert all(copy.damage is None for copy in copies)
    shelf.hidden = ()
    with tierfall.open(retaining(config, 1)) as ckpt:
        ckpt.restore(blank())
        ckpt.save(4, state_of(4), block=True)
        wait_until(lambda: shelf.steps() == [4], "they delete the others")


def test_no_listing_and_no_right_to_read_latest_is_no_first_start(
    config: dict[str, Any], shelf: Shelf
) -> None:
    save_steps(config, 1)
    shelf.refused = {"latest": toolkit.AccessDeniedError}
    assert step_in(tierfall.load(config)) == 1
    shelf.hidden = ("run/",)
    with (
        tierfall.open(config) as ckpt,
        pytest.raises(RestoreError, match=r"latest.*refused.*unreachable='ignore'"),
    ):
        ckpt.restore(blank())


def test_a_start_that_continues_from_what_no_listing_shows_reads_it_by_the_lineage(
    config: dict[str, Any], shelf: Shelf
) -> None:
    """``latest`` could not be written, or was removed."""
    save_steps(config, 1, 2)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(3, state_of(3), block=True)
    for key in [*shelf.of_step(3), "run/latest"]:
        del shelf.values[key]
    shelf.hidden = ("/step-",)
    assert step_in(tierfall.load(config)) == 2


@pytest.mark.usefixtures("impatient")
def test_nothing_is_collected_as_unfinished_while_a_record_is_out_of_reach(
    config: dict[str, Any], shelf: Shelf
) -> None:
    """A parallel file system of which a server is down may say of a file there that it does not exist."""
    save_steps(config, 1, 2, 3)
    first, second = "00001-a0001/commit.json", "00002-a0001/commit.json"
    shelf.hidden = shelf.absent = (first,)
    shelf.refused = {second: toolkit.UnreachableError}
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert report.step == 3
        ckpt.save(4, state_of(4), block=True)
    shelf.hidden = shelf.absent = ()
    shelf.refused = {}
    assert [step_in(tierfall.load(config, step=step)) for step in (1, 2, 3, 4)] == [1, 2, 3, 4]


@pytest.mark.usefixtures("impatient")
def test_what_was_left_unfinished_is_collected_once_a_restore_reaches_all_records(
    config: dict[str, Any], shelf: Shelf
) -> None:
    save_steps(config, 1, 2)
    left = "run/step-00000007-a0001/rank-00000-of-00001.safetensors"
    shelf.values[left] = b"an image"
    shelf.refused = {"00001-a0001/commit.json": toolkit.UnreachableError}
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(3, state_of(3), block=True)
        assert left in shelf.values
        shelf.refused = {}
        ckpt.restore(blank())
        wait_until(lambda: left not in shelf.values, "it is collected")


@pytest.mark.usefixtures("impatient")
def test_a_drain_does_not_take_for_unfinished_what_may_be_out_of_reach(
    config: dict[str, Any], shelf: Shelf, tmp_path: Path
) -> None:
    save_steps(config, 1, 2, 3)
    host, stored = config["tiers"]
    save_steps(
        {**config, "tiers": [host, {**stored, "flush": {"every": 100}}]}, 4
    )  # in memory alone
    shelf.hidden = shelf.absent = ("00001-a0001/commit.json",)
    shelf.refused = {"00002-a0001/commit.json": toolkit.UnreachableError}
    capacity = sum(map(len, shelf.values.values()))
    full = {**config, "tiers": [host, {**stored, "capacity": capacity}]}
    file = tmp_path / "tiers.yaml"
    file.write_text(json.dumps(full))
    answer = CliRunner().invoke(app, ["drain", "--config", str(file)])
    assert "there is room for" in answer.output
    shelf.hidden, shelf.absent, shelf.refused = (), (), {}
    assert shelf.steps() == [1, 2, 3]
    CliRunner().invoke(app, ["drain", "--config", str(file)])
    assert shelf.steps() == [2, 3, 4], "within reach, an older one makes room"


@pytest.mark.usefixtures("impatient")
def test_no_older_step_is_restored_while_files_of_the_newest_may_be_out_of_reach(
    config: dict[str, Any], shelf: Shelf
) -> None:
    """A server is down, with the image of the newest step and the record of an old one."""
    save_steps(config, 1, 2, 3)
    shelf.hidden = shelf.absent = ("00003-a0001/rank-00000-of-00001.safetensors",)
    shelf.refused = {"00001-a0001/commit.json": toolkit.UnreachableError}
    with pytest.raises(RestoreError, match=r"3@1.*could not be read"):
        tierfall.load(config)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="could not be read"):
        ckpt.restore(blank())
    shelf.hidden = shelf.absent = ()
    shelf.refused = {}
    assert step_in(tierfall.load(config)) == 3


@pytest.mark.parametrize("by", ["a drain", "a start that restores nothing"])
def test_no_rule_deletes_while_the_newest_step_is_away(
    by: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    save_steps(make_config(disk={"retain": {"last": 5}}), 1, 2, 3)
    save_steps(make_config(disk={"flush": {"every": 100}}), 4)  # in memory alone
    run = tmp_path / "disk" / "run"
    shutil.move(run / "step-00000003-a0001", tmp_path / "away")
    config = make_config(disk={"retain": {"last": 1}})
    if by == "a drain":
        file = tmp_path / "tiers.yaml"
        file.write_text(json.dumps(config))
        answer = CliRunner().invoke(app, ["drain", "--config", str(file)])
        assert "flushed 4@2 to disk" in answer.output
    else:
        with tierfall.open(config, fresh=True) as ckpt:
            ckpt.save(4, state_of(4), block=True)
            ckpt.drain(10.0)
    for step in (1, 2):
        assert (run / f"step-0000000{step}-a0001/commit.json").exists()


def test_what_was_deleted_is_not_missed(config: dict[str, Any], shelf: Shelf) -> None:
    """Lineage records outlive the checkpoints that they name."""
    save_steps(retaining(config, 1), 1, 2)
    save_steps(retaining(config, 1), 3, 4)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.fallbacks) == (4, ())
        ckpt.delete(4, even_the_last=True)
    assert shelf.steps() == []
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(blank()) is None
