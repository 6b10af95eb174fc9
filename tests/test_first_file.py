"""The file that ``tierfall init`` writes is valid, its figures follow from the answers; notes say what is too small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml

from tierfall.cli.init import (
    MEMORY,
    Answers,
    capacity_bytes,
    notes_on,
    write_first_file,
)
from tierfall.config import load_config

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
ROOMY = dict.fromkeys(("/dev/shm", MEMORY, "/local/checkpoints", "/lustre/checkpoints"), 1 << 50)


def settings(answers: Answers, free: dict[str, int] = ROOMY):  # type: ignore[no-untyped-def]
    return load_config(yaml.safe_load(write_first_file(answers, free)))


def test_sizes_are_those_of_adam_in_mixed_precision() -> None:
    """Llama 3 405B: 405.853e9 parameters of 14 bytes over 16,384 GPUs are 347 MB each."""
    llama = replace(ANSWERS, parameters=405_853_000_000, ranks=16_384)
    assert llama.image_bytes is not None
    assert round(llama.image_bytes / 1e6) == 347


def test_file_has_what_was_answered() -> None:
    found = settings(ANSWERS)
    assert [tier.name for tier in found.chain] == ["host", "disk", "far"]
    assert found.interval.every_s == 600
    assert found.host.capacity_bytes is not None
    assert 2 * 14 * 10**9 < found.host.capacity_bytes < 2.3 * 14 * 10**9
    assert found.stored[1].flush.every == 6
    assert (found.stored[0].shared, found.stored[1].shared) == (None, True)


@pytest.mark.parametrize(
    ("every", "lose", "flush"), [(10, 100, 10), (600.0, 60.0, 1), (10, 3600.0, 1), (7.0, 20.0, 2)]
)
def test_far_tier_gets_copies_so_often_that_no_more_is_lost(
    every: int | float, lose: int | float, flush: int
) -> None:
    assert settings(replace(ANSWERS, every=every, lose=lose)).stored[1].flush.every == flush


@pytest.mark.parametrize(
    ("free", "note"),
    [
        ({**ROOMY, "/dev/shm": 64 << 20}, r"/dev/shm is too small: .*--shm-size"),
        (
            {**ROOMY, MEMORY: 20 * GIB},
            f"{MEMORY} is too small: two images need 28.7 GiB, 20 GiB",
        ),
        (
            {**ROOMY, "/local/checkpoints": 50 * GIB},
            "/local/checkpoints is too small: .* 52.2 GiB, 50 GiB are free",
        ),
    ],
)
def test_what_is_too_small_is_named_with_what_is_needed(free: dict[str, int], note: str) -> None:
    (found,) = notes_on(ANSWERS, free)
    assert re.match(note, found), found


def test_the_first_save_decides_about_memory_that_has_no_room_for_two_images() -> None:
    little = {**ROOMY, MEMORY: 16 * GIB}
    assert capacity_bytes(ANSWERS, little) is None
    assert settings(ANSWERS, little).host.capacity_bytes is None
