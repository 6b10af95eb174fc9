"""Manifest, commit record and attempt: they round-trip, and any error in one is damage."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.format.commit_files import plain
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Geometry,
    Lineage,
    Manifest,
    NamedFile,
    parse_attempt_record,
    parse_commit,
    parse_manifest,
)
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.core.types.view import NodeLosses, SurvivalChance

LINE = Lineage(
    run="gpt",
    checkpoint=CheckpointId(400, 7),
    attempt_id="0123456789abcdef0123456789abcdef",
    ordinal=4,
    started_from=CheckpointId(300, 6),
)
DIGEST = "xxh3-128:" + "0f" * 16
MANIFEST = Manifest(
    lineage=LINE,
    shard=Shard(1, 4),
    image_bytes=65536 + 5 * 4096 + 17,
    data_start=65536,
    chunk_bytes=4096,
    digests=(DIGEST,) * 7,
    structure="a-structure",
    pieces=Spliced(b'[["w","F32",[2,2],0,16]]'),
)
COMMIT = Commit(
    lineage=LINE,
    world_size=1,
    files=(
        NamedFile(name="rank-00000-of-00001.safetensors", bytes=900, digest=None),
        NamedFile(name="rank-00000-of-00001.json", bytes=100, digest="sha256:" + "ab" * 32),
    ),
    nodes=("node-a",),
    wall_time_s=1.5e9,
    metrics={"loss": 2.5, "worst": math.inf},
    tags=("best",),
)
ATTEMPT = Attempt(run="gpt", number=7, id="0f" * 16, node="node-a", pid=42, wall_time_s=1.5e9)

RECORDS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "manifest": (MANIFEST, parse_manifest),
    "commit": (COMMIT, parse_commit),
    "attempt": (ATTEMPT, parse_attempt_record),
}
HUGE = 10**400
NO_TEXT = [None, 7, 1.5, True, [], {}]
NO_NAME = [*NO_TEXT, "", "..", "../x", "/etc/passwd", "a/b", "a\0", "x" * 201, ".hidden", "\ud800"]
NO_NUMBER = [None, "7", 1.0, True, [], {}, -1, 10**19, HUGE]
NO_TIME = [None, "7", True, [], {}, HUGE, -HUGE]
NO_START = [
    0,
    False,
    "300@6",
    [],
    {},
    {"step": 300},
    {"step": -1, "attempt": 6},
    {"step": 300, "attempt": 0},
]

LINE_CASES = {
    "run": NO_NAME,
    "step": [*NO_NUMBER, 10**18],
    "attempt": [*NO_NUMBER, 0, 10**12],
    "attempt_id": NO_TEXT,
    "ordinal": [*NO_NUMBER, 0],
    "started_from": NO_START,
}
HOSTILE: dict[str, dict[str, list[Any]]] = {
    "manifest": {
        **LINE_CASES,
        "rank": [*NO_NUMBER, 4],
        "world_size": [*NO_NUMBER, 0, 1],
        "image_bytes": [*NO_NUMBER, 0, 7, 65535, (1 << 50) + 1, MANIFEST.image_bytes + 4096],
        "data_start": [*NO_NUMBER, 0, 7, MANIFEST.image_bytes + 1, 1 << 40],
        "chunk_bytes": [*NO_NUMBER, 0, 1, 4095, (1 << 30) + 1, 8192],
        "structure": NO_TEXT,
        "chunks": [
            None,
            "x",
            {},
            [],
            [DIGEST] * 6,
            [DIGEST] * 8,
            [7] * 7,
            ["md5:" + "0f" * 16] * 7,
            [DIGEST[:-1]] * 7,
        ],
        "pieces": [None, 7, "x", {}, True],
    },
    "commit": {
        **LINE_CASES,
        "world_size": [*NO_NUMBER, 0],
        "wall_time_s": NO_TIME,
        "nodes": [None, "node-a", {}, [7], [None]],
        "metrics": [
            None,
            7,
            [],
            "x",
            {"loss": None},
            {"loss": []},
            {"loss": "much"},
            {"loss": HUGE},
        ],
        "tags": [None, "best", {}, [7]],
        "files": [None, "x", {}, [7], [None], ["rank"], [{}], [{"name": "x"}], [{"bytes": 1}]]
        + [[{"name": name, "bytes": 1}] for name in NO_NAME]
        + [[{"name": "x", "bytes": number}] for number in NO_NUMBER]
        + [[{"name": "x", "bytes": 1, "digest": digest}] for digest in NO_TEXT],
    },
    "attempt": {
        "run": NO_NAME,
        "attempt": [*NO_NUMBER, 0],
        "attempt_id": NO_TEXT,
        "node": NO_TEXT,
        "pid": NO_NUMBER,
        "wall_time_s": NO_TIME,
    },
}


def members_of(kind: str) -> dict[str, Any]:
    return {k: v for k, v in json.loads(RECORDS[kind][0].encode()).items() if k != "digest"}


def sealed(members: dict[str, Any]) -> bytes:
    """Seal as a stranger would, who also knows how to compute a digest."""
    body = json.dumps(members)[:-1]
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},"digest":"sha256:{digest}"}}\n'.encode()


def hostile_cases() -> Iterator[Any]:
    for kind, members in HOSTILE.items():
        for member, values in members.items():
            yield pytest.param(kind, member, values, id=f"{kind}-{member}")


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_reads_back_as_it_was(kind: str) -> None:
    record, read = RECORDS[kind]
    assert read(record.encode(), what=kind) == record


@pytest.mark.parametrize("kind", RECORDS)
def test_every_member_is_tried_with_hostile_values(kind: str) -> None:
    assert set(HOSTILE[kind]) == set(members_of(kind)) - {"format", "requires"}


@pytest.mark.parametrize(("kind", "member", "values"), list(hostile_cases()))
def test_a_hostile_value_is_damage(kind: str, member: str, values: list[Any]) -> None:
    read = RECORDS[kind][1]
    members = members_of(kind)
    read(sealed(members), what=kind)
    for value in values:
        with pytest.raises(IntegrityError, match="disk: gpt"):
            read(sealed({**members, member: value}), what="disk: gpt")


@pytest.mark.parametrize("kind", RECORDS)
def test_a_missing_member_is_damage_and_never_a_default(kind: str) -> None:
    read = RECORDS[kind][1]
    members = members_of(kind)
    for name in set(members) - {"format", "requires"}:
        with pytest.raises(IntegrityError, match=name):
            read(sealed({k: v for k, v in members.items() if k != name}), what="x")


OWED = (CheckpointId(300, 6), CheckpointId(350, 6))


def test_a_commit_names_what_its_tier_is_still_owed_and_nothing_where_that_is_nothing() -> None:
    assert b"owed" not in COMMIT.encode()
    commit = replace(COMMIT, owed=OWED)
    assert parse_commit(commit.encode(), what="x") == commit
    assert plain(commit) == COMMIT, "that is of one tier"


@pytest.mark.parametrize("value", [None, {}, "300@6", 7, *([start] for start in NO_START), [None]])
def test_a_hostile_debt_is_damage(value: Any) -> None:
    with pytest.raises(IntegrityError, match="owed"):
        parse_commit(sealed({**members_of("commit"), "owed": value}), what="x")


@pytest.mark.parametrize("value", [{}, {"kept_s": 1.0}, {"began_s": "1"}, 1])
def test_a_progress_without_its_beginning_is_damage(value: Any) -> None:
    with pytest.raises(IntegrityError, match="progress"):
        parse_commit(sealed({**members_of("commit"), "progress": value}), what="x")


CHANCE = SurvivalChance(losses=2, probability=14 / 15, exact=True)
LOSSES = NodeLosses(whole=(CHANCE,), copies=(replace(CHANCE, exact=False),))


def test_an_attempt_with_peer_memory_has_what_it_survives() -> None:
    assert b"node_losses" not in ATTEMPT.encode()
    attempt = replace(ATTEMPT, node_losses=LOSSES)
    assert parse_attempt_record(attempt.encode(), what="x") == attempt


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("losses", [*NO_NUMBER, 0]),
        ("probability", [None, "1", True, [], {}, -0.1, 1.1, HUGE]),
        ("exact", ["true", 1, [], {}]),
    ],
)
def test_a_hostile_chance_is_damage(member: str, values: list[Any]) -> None:
    chance = {"losses": 2, "probability": 0.5, "exact": True}
    for value in values:
        losses = {"whole": [{**chance, member: value}], "copies": []}
        with pytest.raises(IntegrityError, match="disk: gpt"):
            parse_attempt_record(
                sealed({**members_of("attempt"), "node_losses": losses}), what="disk: gpt"
            )


@pytest.mark.parametrize("value", [None, [], 7, {}, {"whole": []}, {"whole": [3], "copies": []}])
def test_hostile_chances_are_damage(value: Any) -> None:
    with pytest.raises(IntegrityError, match=r"whole|copies|node_losses"):
        parse_attempt_record(sealed({**members_of("attempt"), "node_losses": value}), what="x")


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 10**6), st.integers(0, 10**7), st.integers(12, 20))
def test_chunks_cover_the_image_without_gap_or_overlap(
    data_start: int, data: int, power: int
) -> None:
    image_bytes, chunk_bytes = data_start + data, 1 << power
    cut = Geometry(image_bytes=image_bytes, data_start=data_start, chunk_bytes=chunk_bytes)
    ranges = [*map(cut.chunk_range, range(cut.chunk_count))]
    assert ranges[0] == (0, data_start)
    assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert ranges[-1][1] == image_bytes
    assert all(0 < end - start <= chunk_bytes for start, end in ranges[1:])
