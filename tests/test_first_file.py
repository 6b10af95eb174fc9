"""The file that ``tierfall init`` writes is valid, its figures follow from the answers; notes say what is too small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml

from tierfall.config import load_config
from tierfall.config.first_file import (
    Answers,
    FreeSpace,
    capacity_bytes,
    notes_on,
    parse_every,
    parse_parameters,
    write_first_file,
)
from tierfall.core.types.errors import ConfigError

GIB = 1 << 30
ANSWERS = Answers(
    run="x",
    disks=("/local/checkpoints",),
    far="/lustre/checkpoints",
    parameters=10**9,
    ranks=1,
    every=600.0,
    lose=3600.0,
)
ROOMY = FreeSpace(
    memory_folder="/dev/shm",
    shared_memory_bytes=1 << 50,
    memory_bytes=1 << 50,
    disks={"/local/checkpoints": 1 << 50, "/lustre/checkpoints": 1 << 50},
)


def settings(answers: Answers, free: FreeSpace = ROOMY):  # type: ignore[no-untyped-def]
    return load_config(yaml.safe_load(write_first_file(answers, free)))


def test_sizes_are_those_of_adam_in_mixed_precision() -> None:
    """Llama 3 405B: 405.853e9 parameters of 14 bytes over 16,384 GPUs are 347 MB each."""
    llama = replace(ANSWERS, parameters=405_853_000_000, ranks=16_384)
    assert llama.image_bytes is not None
    assert round(llama.image_bytes / 1e6) == 347


@pytest.mark.parametrize(
    ("text", "count"),
    [("125M", 125_000_000), ("7B", 7 * 10**9), ("1.5e9", 1_500_000_000), ("12000", 12_000)],
)
def test_parameters_are_written_as_people_do(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize("text", ["", "big", "0", "-1", "7", "9999", "7G", "1e99", "7 B B"])
def test_other_parameters_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of parameters such as 125M"):
        parse_parameters(text)


@pytest.mark.parametrize("text", ["", "0", "often", "0s", "10 steps"])
def test_other_intervals_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="expected steps such as 100, or a time such as 10m"):
        parse_every(text)


def test_file_has_what_was_answered() -> None:
    found = settings(ANSWERS)
    assert [tier.name for tier in found.chain] == ["host", "disk", "far"]
    assert found.interval.every_s == 600
    assert found.host.capacity_bytes is not None
    assert 2 * 14 * 10**9 < found.host.capacity_bytes < 2.3 * 14 * 10**9
    assert found.stored[1].flush.every == 6
    assert (found.stored[0].shared, found.stored[1].shared) == (None, True)


def test_size_that_is_not_known_is_left_to_the_first_save() -> None:
    found = settings(replace(ANSWERS, parameters=None))
    assert found.host.capacity_bytes is None
    assert notes_on(replace(ANSWERS, parameters=None), ROOMY) == []


@pytest.mark.parametrize(
    ("every", "lose", "flush"), [(10, 100, 10), (600.0, 60.0, 1), (10, 3600.0, 1), (7.0, 20.0, 2)]
)
def test_far_tier_gets_copies_so_often_that_no_more_is_lost(
    every: int | float, lose: int | float, flush: int
) -> None:
    assert settings(replace(ANSWERS, every=every, lose=lose)).stored[1].flush.every == flush


def test_address_is_an_object_tier_and_several_disks_are_several_tiers() -> None:
    found = settings(replace(ANSWERS, far="s3://bucket/x", disks=("/a", "~/b", "c: d#")))
    assert [tier.kind.value for tier in found.chain] == ["host", "file", "file", "file", "object"]
    assert "pip install 'tierfall[object]'" in str(
        notes_on(replace(ANSWERS, far="s3://b/x"), ROOMY)
    )


def test_nothing_far_is_said_in_the_file_and_in_a_note() -> None:
    alone = replace(ANSWERS, far=None)
    assert len(settings(alone).stored) == 1
    assert "Nothing here survives the loss of the machine" in write_first_file(alone, ROOMY)
    assert "nothing survives the loss of this machine" in str(notes_on(alone, ROOMY))


def test_enough_of_everything_needs_no_note() -> None:
    assert notes_on(ANSWERS, ROOMY) == []


@pytest.mark.parametrize(
    ("free", "note"),
    [
        (replace(ROOMY, shared_memory_bytes=64 << 20), r"/dev/shm is too small: .*--shm-size"),
        (
            replace(ROOMY, memory_bytes=20 * GIB),
            "memory is short: two images need 28.7 GiB, 20 GiB",
        ),
        (
            replace(ROOMY, disks={"/local/checkpoints": 50 * GIB}),
            "/local/checkpoints is too small: .* 52.2 GiB, 50 GiB are free",
        ),
    ],
)
def test_what_is_too_small_is_named_with_what_is_needed(free: FreeSpace, note: str) -> None:
    (found,) = notes_on(ANSWERS, free)
    assert re.match(note, found), found


def test_little_memory_gets_room_for_one_image_or_none() -> None:
    one = replace(ROOMY, memory_bytes=16 * GIB)
    assert (capacity_bytes(ANSWERS, one) or 0) < 16 * GIB
    assert "Room for one" in write_first_file(ANSWERS, one)
    none = replace(ROOMY, memory_bytes=GIB)
    assert capacity_bytes(ANSWERS, none) is None
    assert settings(ANSWERS, none).host.capacity_bytes is None


def test_docker_is_warned_even_if_the_size_is_not_known() -> None:
    docker = replace(ROOMY, shared_memory_bytes=64 << 20)
    (note,) = notes_on(replace(ANSWERS, parameters=None), docker)
    assert "--shm-size" in note


def test_ranks_of_a_machine_share_its_memory() -> None:
    many = replace(ANSWERS, parameters=7 * 10**9, ranks=8)
    room = replace(ROOMY, memory_bytes=200 * GIB)
    (note,) = notes_on(many, room)
    assert "two images of 8 ranks on this machine need" in note
    assert "Room for one" in write_first_file(many, room)
