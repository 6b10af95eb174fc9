"""Checkpoints from strangers: truncated, exchanged, or crafted with right digests and wrong contents.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import tierfall
from tests.steps import blank, files_below, state_of, step_in
from tierfall.core import documents
from tierfall.core.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
IMAGE = "rank-00000-of-00001.safetensors"
MANIFEST = "rank-00000-of-00001.json"
COMMIT = "commit.json"
Members = dict[str, Any]


@pytest.fixture
def run_folder(make_config: MakeConfig, tmp_path: Path) -> Path:
    """Two committed steps; the tests damage the newer one."""
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2), block=True)
    return tmp_path / "disk" / "run"


@pytest.fixture
def newest(run_folder: Path) -> Path:
    return run_folder / "step-00000002-a0001"


# Sealing what no tierfall would write ------------------------------------------------------------


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


def must_be_refused(make_config: MakeConfig, run_folder: Path, newest: Path) -> str:
    """The step alone is an error, the run falls back to the step before, and no file comes or goes."""
    root = run_folder.parent
    before = files_below(root)
    with pytest.raises(RestoreError) as caught:
        tierfall.load(newest)
    assert step_in(tierfall.load(run_folder)) == 1
    assert files_below(root) == before
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (1, 1)
        assert any("2@1" in f.what for f in report.fallbacks), report.fallbacks
    assert step_in(tierfall.load(run_folder)) == 1
    return str(caught.value)


# Files that are cut, emptied, exchanged or gone --------------------------------------------------


def _truncate(path: Path) -> None:
    os.truncate(path, random.Random(path.name).randrange(path.stat().st_size))


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _scramble(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_link(path: Path) -> None:
    """The very bytes, but by a link out of the tier."""
    target = path.parents[3] / f"outside-{path.name}"
    path.rename(target)
    path.symlink_to(target)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "longer": _lengthen,
    "empty": lambda path: os.truncate(path, 0),
    "scrambled": _scramble,
    "folder": _to_folder,
    "link": _to_link,
    "of another step": lambda path: path.write_bytes(
        (path.parents[1] / "step-00000001-a0001" / path.name).read_bytes()
    ),
}


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (damage, file)
        for damage in DAMAGES
        for file in (IMAGE, MANIFEST, COMMIT)
        if (damage, file) != ("longer", IMAGE)  # what follows an image's end is never read
    ],
)
def test_a_damaged_file_gives_way_to_the_step_before(
    damage: str, file: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    DAMAGES[damage](newest / file)
    if file == COMMIT and damage in ("folder", "link"):
        # Without a commit record there is no such step.
        with pytest.raises(RestoreError, match="step 2"):
            tierfall.load(newest)
        assert step_in(tierfall.load(run_folder)) == 1
        return
    said = must_be_refused(make_config, run_folder, newest)
    assert "2@1" in said


@pytest.mark.parametrize("file", [IMAGE, MANIFEST])
def test_a_missing_file_is_damage_and_not_absence(
    file: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    (newest / file).unlink()
    assert file in must_be_refused(make_config, run_folder, newest)


def test_a_step_that_was_renamed_is_not_believed(
    make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    shutil.copytree(newest, run_folder / "step-00000009-a0001")
    with pytest.raises(RestoreError, match=r"speaks of run 2@1.*moved here from elsewhere"):
        tierfall.load(run_folder / "step-00000009-a0001")
    assert step_in(tierfall.load(run_folder)) == 2
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2


# Documents with right digests and wrong contents -------------------------------------------------

_FILE = {"name": IMAGE, "bytes": 10}
COMMITS: dict[str, Members] = {
    "run leads out": {"run": "../../etc"},
    "run is absolute": {"run": "/etc"},
    "run is another": {"run": "other"},
    "step is another": {"step": 1},
    "step is negative": {"step": -2},
    "step is a float": {"step": 2.0},
    "step is huge": {"step": 10**30},
    "attempt is another": {"attempt": 2},
    "attempt is true": {"attempt": True},
    "another attempt's id": {"attempt_id": "0" * 32},
    "ordinal is 0": {"ordinal": 0},
    "started from text": {"started_from": "2@1"},
    "world is empty": {"world_size": 0},
    "world is huge": {"world_size": 10**18},
    "no files": {"files": []},
    "a file leads out": {"files": [{"name": "../../../owned", "bytes": 10}]},
    "a file is absolute": {"files": [{"name": "/etc/passwd", "bytes": 10}]},
    "a file is no text": {"files": [{"name": 7, "bytes": 10}]},
    "files are no list": {"files": {"name": IMAGE}},
    "a file is no mapping": {"files": [IMAGE]},
    "the image is larger": {"files": [{"name": IMAGE, "bytes": 1 << 49}]},
    "the image is negative": {"files": [{"name": IMAGE, "bytes": -1}]},
    "the image is named twice": {"files": [_FILE, _FILE]},
    "metrics are text": {"metrics": {"loss": "high"}},
    "metrics are nested": {"metrics": {"loss": [1]}},
    "the time is not finite": {"wall_time_s": "inf"},
    "nodes are numbers": {"nodes": [1]},
    "tags are missing": {"tags": None},
}


@pytest.mark.parametrize("name", COMMITS)
def test_a_crafted_commit_record(
    name: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    change_commit(newest, **COMMITS[name])
    must_be_refused(make_config, run_folder, newest)


MANIFESTS: dict[str, Members] = {
    "run leads out": {"run": "../../etc"},
    "step is another": {"step": 1},
    "attempt is another": {"attempt": 2},
    "another attempt's id": {"attempt_id": "0" * 32},
    "rank is another": {"rank": 1, "world_size": 2},
    "rank is beyond the world": {"rank": 1},
    "the image is huge": {"image_bytes": 1 << 49},
    "the image is beyond huge": {"image_bytes": 1 << 80},
    "the image is empty": {"image_bytes": 0},
    "the data start is beyond the image": {"data_start": 1 << 40},
    "the data start is 0": {"data_start": 0},
    "the data start is moved": {"data_start": 4096},
    "chunks are tiny": {"chunk_bytes": 1},
    "chunks are huge": {"chunk_bytes": 1 << 40},
    "chunks are of another size": {"chunk_bytes": 1 << 20},
    "no digests": {"chunks": []},
    "digests are text": {"chunks": "xxh3-128:" * 3},
    "digests are of another kind": {"chunks": ["md5:" + "0" * 32] * 3},
    "digests are wrong": {"chunks": ["xxh3-128:" + "0" * 32] * 3},
    "pieces are no list": {"pieces": 3},
    "no structure": {"structure": None},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_crafted_manifest(
    name: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    change_manifest(newest, **MANIFESTS[name])
    must_be_refused(make_config, run_folder, newest)


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
    said = must_be_refused(make_config, run_folder, newest)
    assert "not the manifest that the commit record names" in said


@pytest.mark.parametrize("file", [MANIFEST, COMMIT])
@pytest.mark.parametrize("bomb", [b"[" * 200_000, b'{"a":' * 100_000, b"9" * 200_000, b"NaN"])
def test_a_json_bomb(
    bomb: bytes, file: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    """In a document whose own digest is right, as a member that nobody asked for."""
    sealed = documents.seal({**members_of(newest / file), "bomb": documents.Spliced(bomb)})
    (newest / file).write_bytes(sealed)
    if file == MANIFEST:
        vouch_for(newest)
    must_be_refused(make_config, run_folder, newest)


@pytest.mark.parametrize("file", [MANIFEST, COMMIT])
@pytest.mark.parametrize("member", [{"format": 2}, {"requires": ["erasure-coding"]}])
def test_a_newer_format_says_what_to_install(
    member: Members, file: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    envelope = {"format": 1, "requires": [], **member}
    head = b'{"format":1,"requires":[]'
    body = documents.seal(members_of(newest / file))[len(head) : -len(documents._TAIL) - 64 - 3]
    body = b"{" + documents.dumps(envelope)[1:-1] + body
    digest = documents.sha256(body)
    (newest / file).write_bytes(body + f',"digest":"{digest}"}}\n'.encode())
    if file == MANIFEST:
        vouch_for(newest)
    said = must_be_refused(make_config, run_folder, newest)
    assert "a newer one" in said
    assert "reads format 1" in said


# Headers -----------------------------------------------------------------------------------------


def _tensor(header: Members) -> Members:
    return header["w"]  # type: ignore[no-any-return]


HEADERS: dict[str, Callable[[Members], Any]] = {
    "offsets beyond the end": lambda h: _tensor(h).update(data_offsets=[0, 1 << 62]),
    "offsets before the start": lambda h: _tensor(h).update(data_offsets=[-80_000, 0]),
    "offsets swapped": lambda h: _tensor(h)["data_offsets"].reverse(),
    "offsets as text": lambda h: _tensor(h).update(data_offsets=["0", "80000"]),
    "a shape of huge size": lambda h: _tensor(h).update(shape=[1 << 40, 1 << 40]),
    "a negative shape": lambda h: _tensor(h).update(shape=[-1, -20_000]),
    "an unknown dtype": lambda h: _tensor(h).update(dtype="PICKLE"),
    "no dtype": lambda h: _tensor(h).pop("dtype"),
    "no tensor of that name": lambda h: h.pop("w"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "metadata of another kind": lambda h: h.update(__metadata__=[]),
    "metadata emptied": lambda h: h["__metadata__"].clear(),
    "values that are no JSON": lambda h: [
        h["__metadata__"].update({key: "{"}) for key in h["__metadata__"]
    ],
    "values that nest without end": lambda h: [
        h["__metadata__"].update({key: "[" * 10_000}) for key in h["__metadata__"]
    ],
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_crafted_header(
    name: str, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    change_header(newest, HEADERS[name])
    must_be_refused(make_config, run_folder, newest)


@pytest.mark.parametrize("length", [0, 7, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_of_another_length(
    length: int, make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    path = newest / IMAGE
    data = bytearray(path.read_bytes())
    data[:8] = struct.pack("<Q", length)
    path.write_bytes(data)
    manifest = members_of(newest / MANIFEST)
    digest = xxhash.xxh3_128_hexdigest(data[: manifest["data_start"]])
    manifest["chunks"][0] = f"xxh3-128:{digest}"
    reseal(newest / MANIFEST, manifest)
    vouch_for(newest)
    must_be_refused(make_config, run_folder, newest)


def test_a_restore_into_a_state_reads_no_stranger_either(
    make_config: MakeConfig, run_folder: Path, newest: Path
) -> None:
    """A shape that fits the bytes but not the tensor that is there: refused by name, nothing is written to it."""
    change_header(newest, lambda header: _tensor(header).update(shape=[200, 100]))
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        with pytest.raises(RestoreError, match="w"):
            ckpt.restore(state)
        assert step_in(state) == -1


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
    for name in ("data.pkl", ".metadata", "__0_0.distcp", "optimizer.pt", f"marks/{IMAGE}"):
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
    must_be_refused(make_config, run_folder, newest)
    assert not trace.exists()


# Where a stranger's files stand ------------------------------------------------------------------


def test_names_that_are_not_ours_are_neither_read_nor_removed(
    make_config: MakeConfig, run_folder: Path
) -> None:
    foreign = {
        "step-00000003": "no attempt",
        "step-00000003-a0001.bak/commit.json": "a copy by hand",
        "STEP-00000003-a0001/commit.json": "another case",
        "notes/step-00000003-a0001/commit.json": "deeper",
        "step-3-a1/commit.json": "too few digits",
        "attempts/readme": "for people",
    }
    for name, text in foreign.items():
        (run_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run_folder / name).write_text(text)
    assert step_in(tierfall.load(run_folder)) == 2
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain()
    for name, text in foreign.items():
        assert (run_folder / name).read_text() == text
