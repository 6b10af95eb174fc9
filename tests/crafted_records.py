"""Sealing what no tierfall would write: records with right digests and wrong contents, and what must become of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tierfall
from tests.steps import blank, files_below, step_in
from tierfall.core.format import documents
from tierfall.core.types.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
IMAGE = "rank-00000-of-00001.safetensors"
MANIFEST = "rank-00000-of-00001.json"
COMMIT = "commit.json"
Members = dict[str, Any]


def members_of(path: Path) -> Members:
    found: Members = json.loads(path.read_bytes())
    for name in ("format", "requires", "digest"):
        del found[name]
    return found


def reseal(path: Path, members: Members) -> None:
    path.write_bytes(documents.seal(members))


def vouch_for(folder: Path) -> None:
    """Let the commit record name image and manifest as they are now."""
    commit = members_of(folder / COMMIT)
    for entry in commit["files"]:
        path = folder / entry["name"]
        entry["bytes"] = path.stat().st_size
        if "digest" in entry:
            entry["digest"] = documents.sha256(path.read_bytes())
    reseal(folder / COMMIT, commit)


def change_commit(folder: Path, **changes: Any) -> None:
    reseal(folder / COMMIT, {**members_of(folder / COMMIT), **changes})


def change_manifest(folder: Path, **changes: Any) -> None:
    reseal(folder / MANIFEST, {**members_of(folder / MANIFEST), **changes})
    vouch_for(folder)


def change_header(folder: Path, change: Callable[[Members], None]) -> None:
    """Rewrite the image's header in its place, and every digest above it."""
    path = folder / IMAGE
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    assert len(text) <= length
    data[8 : 8 + length] = text.ljust(length)
    path.write_bytes(data)
    manifest = members_of(folder / MANIFEST)
    digest = xxhash.xxh3_128_hexdigest(data[: manifest["data_start"]])
    manifest["chunks"][0] = f"xxh3-128:{digest}"
    reseal(folder / MANIFEST, manifest)
    vouch_for(folder)


def must_be_refused(run_folder: Path, newest: Path) -> str:
    """The step alone is an error, the run falls back to the step before, and no file comes or goes."""
    root = run_folder.parent
    before = files_below(root)
    with pytest.raises(RestoreError) as caught:
        tierfall.load(newest)
    assert step_in(tierfall.load(run_folder)) == 1
    assert files_below(root) == before
    return str(caught.value)


def must_be_passed_over(make_config: MakeConfig, run_folder: Path) -> None:
    """A restore takes the step before, says so, and leaves it as it is."""
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (1, 1)
        assert any("2@1" in f.what for f in report.fallbacks), report.fallbacks
    assert step_in(tierfall.load(run_folder)) == 1
