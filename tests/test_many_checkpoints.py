"""A run with thousands of checkpoints, whose old commit records are read in the background: what is restored, and what
a tier is owed, does not depend on when. Requests, and deletions: test_many_checkpoints_of_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.shelf import Shelf
from tests.steps import blank, state_of, step_in
from tierfall.core.format.commit_files import document_file
from tierfall.core.format.records import parse_commit, parse_manifest
from tierfall.core.types.keys import manifest_name
from tierfall.core.types.values import Shard
from tierfall.tiers.stored import FEW

MakeConfig = Callable[..., dict[str, Any]]
MANY = FEW + 8


@pytest.fixture
def config(make_config: MakeConfig, shelf: Shelf, impatient: None) -> dict[str, Any]:
    return with_store(make_config())


def with_store(config: dict[str, Any], **words: Any) -> dict[str, Any]:
    store = {"name": "store", "kind": "object", "url": "shelf://a", **words}
    return {**config, "tiers": [config["tiers"][0], store, *config["tiers"][2:]]}


def multiply(shelf: Shelf, run: str, count: int) -> None:
    """Have step 1 there as each of the steps 1 to ``count``; all have the state of step 1."""
    files = {key.split("/")[2]: value for key, value in shelf.values.items() if "/step-" in key}
    commit = parse_commit(files["commit.json"], what="step 1")
    manifests = {
        name: parse_manifest(files[name], what="step 1")
        for rank in range(commit.world_size)
        if (name := manifest_name(Shard(rank, commit.world_size)))
    }
    for step in range(2, count + 1):
        id = replace(commit.lineage.checkpoint, step=step)
        line = replace(commit.lineage, checkpoint=id, ordinal=commit.lineage.ordinal + step - 1)
        described = {
            name: replace(manifest, lineage=line, written=b"").encode()
            for name, manifest in manifests.items()
        }
        named = tuple(
            document_file(file.name, described[file.name]) if file.name in described else file
            for file in commit.files
        )
        record = replace(commit, lineage=line, files=named).encode()
        folder = f"{run}/step-{step:08d}-a{id.attempt:04d}"
        written = {**files, **described, "commit.json": record}
        shelf.values |= {f"{folder}/{name}": value for name, value in written.items()}


def many(config: dict[str, Any], shelf: Shelf, count: int) -> None:
    """Save step 1, have it there as ``count`` - 1 steps, and save the last step."""
    with tierfall.open(config) as ckpt:
        ckpt.begin()
        ckpt.save(1, state_of(1), block=True)
    multiply(shelf, config["run"], count - 1)
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(blank(), step=count - 1) is not None
        ckpt.save(count, state_of(count), block=True)


def test_a_rollback_without_a_record_of_how_it_began_is_what_a_run_continues_from(
    config: dict[str, Any], shelf: Shelf
) -> None:
    many(config, shelf, MANY)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), step=10)
        ckpt.save(11, state_of(11), block=True)
    # killed between the commit record and the record of how the attempt began
    began = [key for key in shelf.values if "/lineage/" in key]
    assert len(began) == 3, began
    del shelf.values[max(began)]
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
    assert step_in(state) == 11


def test_a_damaged_record_hides_no_rollback_that_only_it_and_one_not_read_tell_of(
    config: dict[str, Any], shelf: Shelf
) -> None:
    many(config, shelf, MANY)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), step=10)
        for step in (11, 12):
            ckpt.save(step, state_of(step), block=True)
    del shelf.values[max(key for key in shelf.values if "/lineage/" in key)]
    damaged = next(key for key in shelf.of_step(12) if "-a0003/commit.json" in key)
    shelf.values[damaged] = b"{}"
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
    assert step_in(state) == 11


def test_what_a_second_tier_is_owed_does_not_depend_on_when_records_are_read(
    make_config: MakeConfig,
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many(with_store(make_config()), shelf, MANY)
    before = dict(shelf.values)
    found = []
    for few in (MANY * 2, FEW):
        monkeypatch.setattr("tierfall.tiers.stored.FEW", few)
        shelf.values = dict(before)
        config = with_store(make_config(disk={}, **{f"far{few}": {"flush": {"every": 4}}}))
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            ckpt.save(MANY + 1, state_of(MANY + 1), block=True)
            ckpt.drain()
        folders = (tmp_path / f"far{few}" / "run").glob("step-*/commit.json")
        found.append(sorted(path.parent.name for path in folders))
    assert found[0] == found[1]
    assert found[0]
