"""A pointer in a folder leads to a checkpoint, says so when the checkpoint is gone, and holds nothing secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import state_of, step_in
from tierfall.config import load_config
from tierfall.core.format import documents
from tierfall.core.types.errors import ConfigError, IntegrityError, RestoreError, StepError
from tierfall.core.types.values import CheckpointId
from tierfall.setup.pointer import POINTER_NAME, pointer_to, write_pointer

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    """Steps 1 and 2, each with a pointer."""
    config = make_config(disk={}, far={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            ckpt.write_pointer(tmp_path / f"out/checkpoint-{step}", step)
    return config


def test_a_pointer_leads_to_its_checkpoint(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out/checkpoint-1"
    assert [path.name for path in folder.iterdir()] == [POINTER_NAME]
    pointer = tierfall.read_pointer(folder)
    assert (pointer.run, pointer.step, pointer.attempt) == ("run", 1, 1)
    assert [(tier["name"], tier["kind"]) for tier in pointer.tiers] == [
        ("host", "host"),
        ("disk", "file"),
        ("far", "file"),
    ]
    monkeypatch.chdir(tmp_path)
    for way in (folder, str(folder), folder / POINTER_NAME, "out/checkpoint-1"):
        assert step_in(tierfall.load(way)) == 1
        assert tierfall.read_pointer(way) == pointer
    assert step_in(tierfall.load(folder, step=1, attempt=1)) == 1
    with pytest.raises(ConfigError, match="is checkpoint 1@1, but step=2"):
        tierfall.load(folder, step=2)


def test_a_run_goes_on_from_a_pointer(config: dict[str, Any], tmp_path: Path) -> None:
    pointer = tierfall.read_pointer(tmp_path / "out/checkpoint-1")
    with tierfall.open(config) as ckpt:
        found = ckpt.load(pointer.step, attempt=pointer.attempt)
        assert found is not None
        assert step_in(found[1]) == 1
        ckpt.write_pointer(tmp_path / "old", 2, attempt=1)
        ckpt.save(2, state_of(2), block=True)
        ckpt.write_pointer(tmp_path / "new", 2)
    assert tierfall.read_pointer(tmp_path / "new").attempt == 2, "the live lineage"
    assert tierfall.read_pointer(tmp_path / "old").attempt == 1


def test_a_pointer_to_a_save_in_flight_is_one_to_what_it_becomes(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1))
        ckpt.write_pointer(tmp_path / "p", 1)
    assert step_in(tierfall.load(tmp_path / "p")) == 1


def test_a_pointer_replaces_another(config: dict[str, Any], tmp_path: Path) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.write_pointer(tmp_path / "out/checkpoint-1", 2)
    assert step_in(tierfall.load(tmp_path / "out/checkpoint-1")) == 2


def test_a_pointer_to_a_deleted_step_says_what_there_is(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(state_of(0))
        ckpt.delete(1)
    with pytest.raises(RestoreError) as raised:
        tierfall.load(tmp_path / "out/checkpoint-1")
    message = str(raised.value)
    assert message.startswith(
        f"load: {tmp_path}/out/checkpoint-1 points to checkpoint 1@1 of run 'run': "
    )
    assert "there are: 2@1 on" in message
    assert message.count("load:") == 1


def test_no_pointer_is_written_to_what_is_not_known(config: dict[str, Any], tmp_path: Path) -> None:
    with tierfall.open(config) as ckpt:
        with pytest.raises(StepError, match=r"write_pointer: step 7 is not known; .* 1@1, 2@1"):
            ckpt.write_pointer(tmp_path / "p", 7)
        with pytest.raises(StepError, match="write_pointer: step must be an integer"):
            ckpt.write_pointer(tmp_path / "p", "7")  # type: ignore[arg-type]
    assert not (tmp_path / "p").exists()


def test_nothing_secret_is_in_a_pointer(tmp_path: Path) -> None:
    options = {"key": "AKIA-SECRET", "secret": "VERY-SECRET"}
    stores = [
        {"name": "s3", "kind": "object", "url": "s3://bucket/runs", "options": options},
        {"name": "web", "kind": "object", "url": "memory://SECRET/bucket"},
    ]
    disk = {"name": "disk", "kind": "file", "path": str(tmp_path / "disk")}
    config = load_config({"run": "run", "tiers": [{"name": "host", "kind": "host"}, disk, *stores]})
    write_pointer(tmp_path / "p", pointer_to(config, CheckpointId(1, 1)))
    assert "SECRET" not in (tmp_path / "p" / POINTER_NAME).read_text()
    pointer = tierfall.read_pointer(tmp_path / "p")
    assert [tier["name"] for tier in pointer.tiers] == ["host", "disk", "s3"]
    assert pointer.tiers[2]["url"] == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "has no pointer"), ("file", "has no pointer")]
)
def test_a_folder_without_a_pointer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        tierfall.read_pointer(tmp_path / name)


def test_a_damaged_pointer_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "out/checkpoint-1" / POINTER_NAME
    file.write_bytes(file.read_bytes().replace(b'"step":1', b'"step":2'))
    for read in (tierfall.read_pointer, tierfall.load):
        with pytest.raises(IntegrityError, match="digest does not match"):
            read(file.parent)  # type: ignore[operator]


@pytest.mark.parametrize(
    "tier",
    [
        {"name": "x", "kind": "file", "path": "relative"},
        {"name": "x", "kind": "object", "url": "simplecache::s3://bucket"},
        {"name": "x", "kind": "object", "url": "ssh://host/folder"},
        {"name": "x", "kind": "object", "url": "s3://u:p@host/b"},
        {"name": "x", "kind": "device", "path": "/tmp"},
        {"name": "../x", "kind": "file", "path": "/tmp"},
        {"name": "x", "kind": "file"},
        {"kind": "file", "path": "/tmp"},
    ],
)
def test_a_crafted_pointer_reaches_nothing(tmp_path: Path, tier: dict[str, str]) -> None:
    document = {"run": "run", "step": 1, "attempt": 1, "tiers": [tier]}
    (tmp_path / POINTER_NAME).write_bytes(documents.seal(document))
    with pytest.raises(IntegrityError, match="pointer"):
        tierfall.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [POINTER_NAME]
