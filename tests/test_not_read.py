"""What may not be read is not damaged.

Damage is a digest or a size that differs, or the store's own answer that a key is absent while the tier's id can be
read. Whatever else a store says, on whatever medium, nothing is known of the checkpoint: no restore passes over it in
silence, and nothing deletes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all
from tests.shelf import Shelf
from tests.steps import blank, falls_back_if_asked, state_of, step_in, steps_on, wait_until
from tierfall.backends import toolkit
from tierfall.cli.app import app
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


def save(config: dict[str, Any], *steps: int) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), unreachable="ignore")
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


def two_steps(config: dict[str, Any], *, retain: int = 2) -> None:
    """Save steps 1 and 2, which stay."""
    kept = {**config["tiers"][1], "retain": {"last": retain}}
    save({**config, "tiers": [config["tiers"][0], kept, *config["tiers"][2:]]}, 1, 2)


# Whatever the store says -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [toolkit.AccessDeniedError, toolkit.BackendError, toolkit.UnreachableError],
    ids=["denied", "an odd answer", "no answer"],
)
def test_a_file_that_could_not_be_read_is_neither_passed_over_nor_deleted(
    error: type[toolkit.BackendError], config: dict[str, Any], shelf: Shelf
) -> None:
    two_steps(config)
    for file in FILES:
        shelf.refused = {f"step-00000002-a0001/{file}": error}
        with pytest.raises(RestoreError, match=r"2@1.*refused"):
            tierfall.load(config)
        with tierfall.open(config) as ckpt:
            with pytest.raises(RestoreError, match=f"2@1.*refused.*{IGNORE}") as ended:
                ckpt.restore(blank())
            assert "HALF FILLED" not in str(ended.value) or file == FILES[0]
    shelf.refused = {}
    assert step_in(tierfall.load(config)) == 2


@pytest.mark.parametrize("file", FILES)
def test_ignoring_it_goes_on_with_an_older_step_and_deletes_nothing_of_it(
    file: str, config: dict[str, Any], shelf: Shelf
) -> None:
    two_steps(config)
    newest = shelf.of_step(2)
    shelf.refused = {f"step-00000002-a0001/{file}": toolkit.AccessDeniedError}
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank(), unreachable="ignore")
        assert report is not None
        assert report.step == 1
        assert any("2@1" in each.what for each in report.fallbacks)
        for step in (3, 4, 5):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: shelf.steps() == [2, 5], "the rules delete what could be read")
        ckpt.drain(10.0)
    assert shelf.of_step(2) == newest
    shelf.refused = {}
    assert step_in(tierfall.load(config, step=2, attempt=1)) == 2


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


def test_what_a_newer_version_wrote_is_not_passed_over(
    config: dict[str, Any], shelf: Shelf
) -> None:
    two_steps(config)
    key = next(key for key in shelf.of_step(2) if key.endswith("commit.json"))
    shelf.values[key] = _of_format_2(shelf.values[key])
    with tierfall.open(config) as ckpt:
        falls_back_if_asked(ckpt, "2@1.*install the tierfall", 1)


def _of_format_2(document: bytes) -> bytes:
    body = document.rpartition(b',"digest"')[0].replace(b'"format":1', b'"format":2')
    digest = hashlib.sha256(body).hexdigest()
    return body + b',"digest":"sha256:' + digest.encode() + b'"}\n'


@pytest.mark.parametrize(
    "absent",
    [
        *((f"step-00000002-a0001/{file}",) for file in FILES),
        ("commit.json",),
        ("commit.json", "latest", "lineage", "tier.json"),
    ],
    ids=" ".join,
)
def test_what_is_listed_and_called_absent_is_neither_passed_over_nor_deleted(
    absent: tuple[str, ...], config: dict[str, Any], shelf: Shelf
) -> None:
    """A store that contradicts itself has not said what is there."""
    two_steps(config)
    there = {key for key in shelf.values if "/step-" in key}
    shelf.absent = absent
    with pytest.raises(RestoreError, match=r"step-0000000\d-a0001/.*and "):
        tierfall.load(config)
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match=IGNORE):
            ckpt.restore(blank())
        if absent == ("step-00000002-a0001/commit.json",):
            ckpt.restore(blank(), step=1)
            for step in (3, 4):
                ckpt.save(step, state_of(step), block=True)
            ckpt.drain(10.0)
            assert there <= shelf.values.keys(), "no rule deletes in this start"
    shelf.absent = ()
    assert step_in(tierfall.load(config, step=2, attempt=1)) == 2


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


def test_verify_calls_nothing_absent_while_the_id_of_the_tier_cannot_be_read(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={})
    save(config, 1)
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "disk" / "run"
    files = [run / "tier.json", run / "step-00000001-a0001" / FILES[0]]
    for file in files:
        file.rename(tmp_path / file.name)
    files[0].symlink_to(tmp_path / "tier.json")
    words = ["verify", "--config", str(tmp_path / "tiers.yaml")]
    output = CliRunner().invoke(app, words).output
    assert "tier.json" in output
    assert "could not be read" in output
    assert not list(run.glob("step-*/marks/*"))
    files[0].unlink()
    for file in files:
        (tmp_path / file.name).rename(file)
    assert CliRunner().invoke(app, words).exit_code == 0
    assert step_in(tierfall.load(config)) == 1


def test_an_export_of_what_could_not_be_read_does_not_call_it_damaged(
    config: dict[str, Any], shelf: Shelf, tmp_path: Path
) -> None:
    two_steps(config)
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(config))
    shelf.refused = {"step-00000002-a0001/commit.json": toolkit.AccessDeniedError}
    words = ["export", "2", "--to", str(tmp_path / "out.pt")]
    result = CliRunner().invoke(app, [*words, "--config", str(tmp_path / "tiers.yaml")])
    assert result.exit_code == 1
    output = str(result.exception) + result.output
    assert "commit.json: refused" in output
    assert "damaged" not in output


def test_a_readable_copy_on_another_tier_is_restored(
    config: dict[str, Any], shelf: Shelf, tmp_path: Path
) -> None:
    config["tiers"].append({"name": "disk", "kind": "file", "path": str(tmp_path / "disk")})
    two_steps(config)
    shelf.refused = {"step-00000002-a0001/rank": toolkit.AccessDeniedError}
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.sources[0].tier) == (2, "disk")
        assert all(each.id is not None and each.id.step == 2 for each in report.fallbacks)


# On a file system ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [*(f"a link for {file}" for file in FILES), "a link for the folder", "a FIFO"]
)
def test_links_and_special_files_are_neither_followed_nor_taken_for_absent(
    what: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """People and tools move files to another disk, and link them back."""
    config = make_config(disk={"retain": {"last": 2}})
    save(config, 1, 2)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    path = folder / what.rpartition(" ")[2] if what.endswith(FILES) else folder
    path = folder / "commit.json" if what == "a FIFO" else path
    path.rename(tmp_path / "elsewhere")
    if what == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    there = (folder / "rank-00000-of-00001.json").read_bytes()
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        report = falls_back_if_asked(ckpt, "2@1", 1)
        assert any("link" in each.reason for each in report.fallbacks)
        for step in (3, 4):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain(10.0)
        wait_until(lambda: not (folder.parent / "step-00000003-a0002").exists(), "rules apply")
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert (folder / "rank-00000-of-00001.json").read_bytes() == there
    assert step_in(tierfall.load(folder)) == 2


@pytest.mark.parametrize("file", FILES)
def test_a_folder_in_place_of_a_file_is_no_absence(
    file: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """An extraction or a copy made a folder of that name: an empty one, too, is no word on the file."""
    save(make_config(disk={"retain": {"last": 2}}), 1, 2)
    path = tmp_path / "disk" / "run" / "step-00000002-a0001" / file
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    for _ in range(2):
        with (
            tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt,
            pytest.raises(RestoreError, match=f"2@1.*is a folder.*{IGNORE}"),
        ):
            ckpt.restore(blank())
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    assert step_in(tierfall.load(path.parent)) == 2


def test_a_file_in_place_of_a_step_folder_is_no_absence(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"retain": {"last": 2}})
    save(config, 1, 2)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    folder.rename(tmp_path / "elsewhere")
    folder.write_bytes(b"")
    message = f"2@1.*is a file.*{IGNORE}"
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match=message):
        ckpt.restore(blank())
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert step_in(tierfall.load(config)) == 2


def test_a_folder_that_may_not_be_opened_hides_no_other_step(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_config(disk={"retain": {"last": 2}}), 1, 2)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    there, open_any = sorted(folder.iterdir()), os.open

    def open_others(path: Any, *args: Any, **options: Any) -> int:
        if path == folder.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_any(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_others)
        with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
            falls_back_if_asked(ckpt, "2@1.*Permission denied", 1)
            for step in (3, 4):
                ckpt.save(step, state_of(step), block=True)
            wait_until(lambda: not (folder.parent / "step-00000003-a0002").exists(), "rules apply")
    assert sorted(folder.iterdir()) == there
    assert step_in(tierfall.load(folder)) == 2


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


# Several ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "commit.json"])
def test_what_one_rank_could_not_read_all_ranks_keep(
    file: str, ranks: list[Ranks], tmp_path: Path
) -> None:
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
        return Checkpointer(Config.model_validate(config), run="run", ranks=ranks[rank])

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
    path = places[1] / "disk" / "run" / "step-00000002-a0001" / file
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
