"""A pointer in a folder leads to a checkpoint, says so when the checkpoint is gone, and holds nothing secret."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierfall
from tierfall.config import load_config
from tierfall.core.format import documents
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId
from tierfall.setup.pointer import POINTER_NAME, pointer_to, write_pointer


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
