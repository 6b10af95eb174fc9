"""Names and keys: a written one parses back, and one that does not parse is not tierfall's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId, Codec, Shard

steps = st.integers(0, keys.STEP_MAX)
attempts = st.integers(1, keys.ATTEMPT_MAX)
shards = st.integers(1, 10**9 - 1).flatmap(
    lambda world_size: st.builds(Shard, st.integers(0, world_size - 1), st.just(world_size))
)


@settings(max_examples=40, deadline=None)
@given(steps, attempts)
def test_a_step_folder_parses_back(step: int, attempt: int) -> None:
    checkpoint = CheckpointId(step, attempt)
    assert keys.parse_step_folder(keys.step_folder(checkpoint)) == checkpoint


@settings(max_examples=40, deadline=None)
@given(shards)
def test_a_shard_parses_back_from_the_names_of_its_files(shard: Shard) -> None:
    images = [keys.shard_name(shard, codec) for codec in Codec]
    assert images[0] == keys.shard_name(shard)
    for name in (*images, keys.manifest_name(shard), keys.stored_name(shard)):
        assert keys.parse_shard(name) == shard
        assert keys.is_tierfall_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "step-400-a7",
        "step-00000400",
        "step-00000400-a0007.tmp",
        "step-00000400-a0007\n",
        "xstep-00000400-a0007",
        "step--0000400-a0007",
        "step-0000040٣-a0007",
        "STEP-00000400-a0007",
        "step-00000400-a0007/",
        "step-" + "9" * 19 + "-a0007",
        "",
    ],
)
def test_a_folder_that_is_not_ours_does_not_parse(name: str) -> None:
    assert keys.parse_step_folder(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000-of-00004.safetensors.tmp",
        "rank-00000-of-00004.bin",
        "rank-00000-of-00004.zst",
        "rank-00000-of-00004.safetensors.gz",
        "rank-00000-of-00004.safetensors.zst.tmp",
        "rank-00000-of-00004.safetensors.stored.json",
        "rank-00000-of-00004.json.zst",
        "rank-00000-of-00004",
        "rank-0-of-4.json",
        "model.safetensors",
        "rank-00000-of-00004.safetensors\n",
    ],
)
def test_a_file_that_tierfall_did_not_write_is_not_ours(name: str) -> None:
    assert keys.parse_shard(name) is None
    assert not keys.is_tierfall_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "pin",
        "decided/000001-pin-step-00000400-a0007-0123456789abcdef",
        "other/commit.json",
        "/commit.json",
        "../commit.json",
        "commit.json\n",
        "",
    ],
)
def test_what_a_user_put_there_is_not_ours(name: str) -> None:
    assert not keys.is_tierfall_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "_x",
        "a/b",
        "../a",
        "a b",
        "a\n",
        "a\0",
        "ä",
        "a\\b",
        "x" * 201,
        "٣",
    ],
)
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run: .*expected at most 200 letters"):
        keys.check_name(name, what="run")
