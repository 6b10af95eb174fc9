"""Checkpoints from strangers: truncated, exchanged, claiming huge sizes, or holding pickles and foreign files.

Whatever they hold, a load gives a clear error or, where there is one, an older step; it runs no code, writes nothing,
and allocates no more than it was promised.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
from tests.steps import blank, state_of, step_in
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.format import documents
from tierfall.core.image.layout import table_digest
from tierfall.core.types.errors import IntegrityError, RestoreError
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import resolve_path
from tierfall.setup.pointer import POINTER_NAME
from tierfall.tiers.stored import StoredTier

# Files that are cut, emptied, exchanged or gone --------------------------------------------------


def test_a_step_that_was_renamed_is_not_believed(
    make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    shutil.copytree(newest, run_folder / "step-00000009-a0001")
    with pytest.raises(RestoreError, match=r"is the record of run 2@1.*moved here from elsewhere"):
        tierfall.load(run_folder / "step-00000009-a0001")
    assert step_in(tierfall.load(run_folder)) == 2
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2


# Memory, and code --------------------------------------------------------------------------------


def test_sizes_that_a_stranger_claims_are_not_allocated(run_folder: Path, newest: Path) -> None:
    """A PiB in chunks of a GiB, every digest list as long as it must be."""
    image_bytes, chunk_bytes = 1 << 44, 1 << 30
    manifest = members_of(newest / MANIFEST)
    count = 1 + -(-(image_bytes - manifest["data_start"]) // chunk_bytes)
    chunks = [manifest["chunks"][0], *["xxh3-128:" + "0" * 32] * (count - 1)]
    change_manifest(newest, image_bytes=image_bytes, chunk_bytes=chunk_bytes, chunks=chunks)
    commit = members_of(newest / COMMIT)
    next(f for f in commit["files"] if f["name"] == IMAGE)["bytes"] = image_bytes
    reseal(newest / COMMIT, commit)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    with pytest.raises(RestoreError, match="2@1"):
        tierfall.load(newest)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    assert python_peak < 64 << 20
    assert grown < 64 << 10  # in KiB
    assert step_in(tierfall.load(run_folder)) == 1


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_is_never_unpickled(
    make_config: MakeConfig,
    run_folder: Path,
    newest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = tmp_path / "owned"
    bomb = pickle.dumps({"w": Bomb(trace)})

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    for name in ("data.pkl", ".metadata", "__0_0.distcp", "optimizer.pt", f"deep/{IMAGE}"):
        (newest / name).parent.mkdir(exist_ok=True)
        (newest / name).write_bytes(bomb)
    assert step_in(tierfall.load(newest)) == 2
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2
        ckpt.restore(state, step=1)
        ckpt.save(3, state_of(3), block=True)
        ckpt.prune()
        ckpt.drain()
    for name in ("data.pkl", ".metadata"):
        assert (newest / name).read_bytes() == bomb, "a foreign file was removed"
    for name in (IMAGE, MANIFEST, COMMIT):
        (newest / name).write_bytes(bomb)
    with pytest.raises(RestoreError):
        tierfall.load(newest)
    assert not trace.exists()


def test_a_pickle_in_place_of_an_image_with_right_digests(
    make_config: MakeConfig, run_folder: Path, newest: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "owned"
    data = pickle.dumps({"w": Bomb(trace)}).ljust(8192)
    (newest / IMAGE).write_bytes(data)
    digests = [f"xxh3-128:{xxhash.xxh3_128_hexdigest(part)}" for part in (data[:4096], data[4096:])]
    change_manifest(newest, image_bytes=8192, data_start=4096, chunk_bytes=4096, chunks=digests)
    must_be_refused(run_folder, newest)
    must_be_passed_over(make_config, run_folder)
    assert not trace.exists()


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


# One flipped bit ------------------------------------------------------------------------------------


SEED = 20261121


@pytest.fixture
def step_folder(make_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A checkpoint of 24 KiB in chunks of 4 KiB, with several dtypes."""
    state = {
        "w": torch.randn(2000),
        "h": torch.randn(1501).bfloat16(),
        "odd": torch.arange(333, dtype=torch.uint8),
        "extra": {"epoch": 3},
    }
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        ckpt.save(1, state, metrics={"loss": 0.5}, tags=["first"], block=True)
    return tmp_path / "disk" / "run" / "step-00000001-a0001"


def flips(folder: Path, trials: int) -> Iterator[tuple[str, int]]:
    """Flip a random bit of a random file, hand out where, and flip it back."""
    source = random.Random(SEED)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [str(path.relative_to(folder)) for path in files] == [
        "commit.json",
        "rank-00000-of-00001.json",
        "rank-00000-of-00001.safetensors",
    ]
    for _ in range(trials):
        path = source.choice(files)
        good = path.read_bytes()
        bit = source.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        yield str(path.relative_to(folder)), bit
        path.write_bytes(good)


@pytest.mark.parametrize("trials", [60, pytest.param(3000, marks=pytest.mark.torture)])
def test_every_flipped_bit_is_found_and_refused(step_folder: Path, trials: int) -> None:
    place = resolve_path(step_folder)
    backend = PosixBackend(place.root, read_only=True)
    store = StoredTier(name="disk", run=place.run, backend=backend)
    id = CheckpointId(1, 1)
    missed = []
    with CopyVerifier() as verifier:
        assert verifier.check_stored(store, id).good
        for file, bit in flips(step_folder, trials):
            found = verifier.check_stored(store, id)
            if file not in {damage.file for damage in found.damage}:
                missed.append((file, bit))
            with pytest.raises(RestoreError, match="1@1"):
                tierfall.load(step_folder)
        assert verifier.check_stored(store, id).good
    store.close()
    assert missed == []
    assert tierfall.load(step_folder)["w"].shape == (2000,)


# Pointers -------------------------------------------------------------------------------------------


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
