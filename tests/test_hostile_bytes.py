"""Checkpoints from strangers: truncated, exchanged, claiming huge sizes, or holding pickles and foreign files.

Whatever they hold, a load gives a clear error or, where there is one, an older step; it runs no code, writes nothing,
and allocates no more than it was promised.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import tracemalloc
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
    change_manifest,
    members_of,
    must_be_passed_over,
    must_be_refused,
    reseal,
)
from tests.steps import blank, state_of, step_in
from tierfall.core.types.errors import RestoreError

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
