"""Checkpoints from strangers: commit records, manifests and headers with right digests and wrong contents.

Whatever they hold, a load gives a clear error or, where there is one, an older step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tierfall
from tests.crafted_records import (
    COMMIT,
    IMAGE,
    MANIFEST,
    MakeConfig,
    Members,
    change_commit,
    change_header,
    change_manifest,
    members_of,
    must_be_passed_over,
    must_be_refused,
    reseal,
    vouch_for,
)
from tests.steps import blank, step_in
from tierfall.core.format import documents
from tierfall.core.image.layout import table_digest
from tierfall.core.types.errors import RestoreError

# Commit records and manifests ----------------------------------------------------------------------

_FILE = {"name": IMAGE, "bytes": 10}
COMMITS: dict[str, Members] = {
    "run leads out": {"run": "../../etc"},
    "run is another": {"run": "other"},
    "step is another": {"step": 1},
    "step is huge": {"step": 10**30},
    "attempt is another": {"attempt": 2},
    "attempt is true": {"attempt": True},
    "started from text": {"started_from": "2@1"},
    "world is huge": {"world_size": 10**18},
    "no files": {"files": []},
    "a file leads out": {"files": [{"name": "../../../owned", "bytes": 10}]},
    "files are no list": {"files": {"name": IMAGE}},
    "the image is larger": {"files": [{"name": IMAGE, "bytes": 1 << 49}]},
    "the image is named twice": {"files": [_FILE, _FILE]},
    "a file that is no image is packed": {
        "files": [_FILE, {"name": "notes.json", "bytes": 5, "digest": "sha256:0", "raw_bytes": 9}]
    },
    "a raw image is packed": {"files": [{**_FILE, "raw_bytes": 9}]},
    "a packed image has no length": {"files": [{"name": f"{IMAGE}.zst", "bytes": 10}]},
    "a packed image is huge": {
        "files": [{"name": f"{IMAGE}.zst", "bytes": 9, "raw_bytes": 1 << 60}]
    },
    "the image is there raw and packed": {
        "files": [_FILE, {"name": f"{IMAGE}.tfz", "bytes": 9, "raw_bytes": 10}]
    },
    "metrics are text": {"metrics": {"loss": "high"}},
    "the time is not finite": {"wall_time_s": "inf"},
    "nodes are numbers": {"nodes": [1]},
    "tags are missing": {"tags": None},
}


@pytest.mark.parametrize("name", COMMITS)
def test_a_crafted_commit_record(name: str, run_folder: Path, newest: Path) -> None:
    change_commit(newest, **COMMITS[name])
    must_be_refused(run_folder, newest)


def test_a_crafted_commit_record_of_another_attempts_id(run_folder: Path, newest: Path) -> None:
    """It says that two starts took one number: which of them counts is a person's to say."""
    change_commit(newest, **{"attempt_id": "0" * 32})
    with pytest.raises(RestoreError):
        tierfall.load(newest)
    with pytest.raises(RestoreError, match="name it by step= and attempt= to go back to it"):
        tierfall.load(run_folder)


MANIFESTS: dict[str, Members] = {
    "run leads out": {"run": "../../etc"},
    "step is another": {"step": 1},
    "attempt is another": {"attempt": 2},
    "rank is another": {"rank": 1, "world_size": 2},
    "the image is huge": {"image_bytes": 1 << 49},
    "the image is empty": {"image_bytes": 0},
    "the data start is beyond the image": {"data_start": 1 << 40},
    "the data start is moved": {"data_start": 4096},
    "chunks are tiny": {"chunk_bytes": 1},
    "chunks are huge": {"chunk_bytes": 1 << 40},
    "no digests": {"chunks": []},
    "digests are of another kind": {"chunks": ["md5:" + "0" * 32] * 3},
    "digests are wrong": {"chunks": ["xxh3-128:" + "0" * 32] * 3},
    "pieces are no list": {"pieces": 3},
    "no structure": {"structure": None},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_crafted_manifest(name: str, run_folder: Path, newest: Path) -> None:
    change_manifest(newest, **MANIFESTS[name])
    must_be_refused(run_folder, newest)


def test_an_image_exchanged_together_with_its_manifest(
    make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    """They fit each other, and every line in them is right: only the commit record knows better."""
    image = bytearray((newest / IMAGE).read_bytes())
    image[-1] ^= 1
    (newest / IMAGE).write_bytes(image)
    manifest = members_of(newest / MANIFEST)
    start = manifest["data_start"] + (len(manifest["chunks"]) - 2) * manifest["chunk_bytes"]
    manifest["chunks"][-1] = f"xxh3-128:{xxhash.xxh3_128_hexdigest(image[start:])}"
    reseal(newest / MANIFEST, manifest)
    output = must_be_refused(run_folder, newest)
    must_be_passed_over(make_config, run_folder)
    assert "not the manifest that the commit record names" in output


@pytest.mark.parametrize("file", [MANIFEST, COMMIT])
@pytest.mark.parametrize("bomb", [b'{"a":' * 100_000, b"9" * 200_000, b"NaN"])
def test_a_json_bomb(bomb: bytes, file: str, run_folder: Path, newest: Path) -> None:
    """In a document whose own digest is right, as a member that nobody asked for."""
    sealed = documents.seal({**members_of(newest / file), "bomb": documents.Spliced(bomb)})
    (newest / file).write_bytes(sealed)
    if file == MANIFEST:
        vouch_for(newest)
    must_be_refused(run_folder, newest)


# Headers -----------------------------------------------------------------------------------------


def _tensor(header: Members) -> Members:
    return header["w"]  # type: ignore[no-any-return]


HEADERS: dict[str, Callable[[Members], Any]] = {
    "offsets beyond the end": lambda h: _tensor(h).update(data_offsets=[0, 1 << 62]),
    "offsets before the start": lambda h: _tensor(h).update(data_offsets=[-80_000, 0]),
    "offsets swapped": lambda h: _tensor(h)["data_offsets"].reverse(),
    "a shape of huge size": lambda h: _tensor(h).update(shape=[1 << 40, 1 << 40]),
    "a negative shape": lambda h: _tensor(h).update(shape=[-1, -20_000]),
    "an unknown dtype": lambda h: _tensor(h).update(dtype="PICKLE"),
    "no dtype": lambda h: _tensor(h).pop("dtype"),
    "no tensor of that name": lambda h: h.pop("w"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "metadata of another kind": lambda h: h.update(__metadata__=[]),
    "values that are no JSON": lambda h: [
        h["__metadata__"].update({key: "{"}) for key in h["__metadata__"]
    ],
    "values that nest without end": lambda h: [
        h["__metadata__"].update({key: "[" * 10_000}) for key in h["__metadata__"]
    ],
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_crafted_header(name: str, run_folder: Path, newest: Path) -> None:
    change_header(newest, HEADERS[name])
    must_be_refused(run_folder, newest)


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 64) - 1])
def test_a_header_of_another_length(length: int, run_folder: Path, newest: Path) -> None:
    path = newest / IMAGE
    data = bytearray(path.read_bytes())
    data[:8] = struct.pack("<Q", length)
    path.write_bytes(data)
    manifest = members_of(newest / MANIFEST)
    digest = xxhash.xxh3_128_hexdigest(data[: manifest["data_start"]])
    manifest["chunks"][0] = f"xxh3-128:{digest}"
    reseal(newest / MANIFEST, manifest)
    vouch_for(newest)
    must_be_refused(run_folder, newest)


def test_a_restore_into_a_state_reads_no_stranger_either(
    make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    """A shape that fits the bytes but not the tensor that is there: refused by name, nothing is written to it."""

    def transpose(header: Members) -> None:
        _tensor(header).update(shape=[200, 100])
        layout = json.loads(header["__metadata__"]["tierfall"])
        layout["table"] = table_digest(
            (name, entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        )
        header["__metadata__"]["tierfall"] = json.dumps(layout)

    change_header(newest, transpose)
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        with pytest.raises(RestoreError, match="w"):
            ckpt.restore(state)
        assert step_in(state) == -1
