"""A copy counts as damaged after two wrong reads in a row: a bit flip in transit is no damage."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest

from tests.core.flush.test_damaged_entries import CODECS, FIRST, damage, saved
from tests.simulation.world import World, decided_on, file_rules
from tierfall.backends.wrappers import Wrapper
from tierfall.core.copies.verify import CopyVerifier, Damage
from tierfall.core.types.values import Codec

IMAGE = "*.safetensors*"
KINDS = [
    (Codec.NONE, "*/commit.json"),
    (Codec.NONE, "*/rank-*[0-9].json"),
    (Codec.NONE, IMAGE),
    (Codec.ZSTD, "*.stored.json"),
    (Codec.ZSTD, IMAGE),
]


class Misreading(Wrapper):
    """A bit flips in the next ``times`` reads of ``files``."""

    files, times = "", 0

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        super().read_into(key, offset, view)
        if self.times and fnmatchcase(key, self.files):
            self.times -= 1
            view[len(view) // 2] ^= 1

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        return False


def nvme_alone(codec: Codec) -> tuple[World, Misreading]:
    """A start: ``pfs`` is owed a copy, and the only one is on ``nvme``."""
    rules = (file_rules("nvme"), file_rules("pfs"))
    world = saved((1,), *rules, codecs={"nvme": codec}, wrap=lambda name, inner: Misreading(inner))
    world.disks["pfs"]._objects.clear()
    world.start()
    nvme = world._backends["nvme"]
    assert isinstance(nvme, Misreading)
    return world, nvme


def is_noted(world: World) -> bool:
    return decided_on([world.disks["nvme"]]).damage(FIRST, None) is not None


def found_by_verify(world: World) -> tuple[Damage, ...]:
    with CopyVerifier() as verifier:
        found = verifier.check_stored(world.stores["nvme"], FIRST)
    return tuple(d for d in found.damage if d.chunk != 0)  # no image of this world has a header


@pytest.mark.parametrize(("codec", "files"), KINDS)
def test_verify_does_not_report_what_was_misread_once(codec: Codec, files: str) -> None:
    world, nvme = nvme_alone(codec)
    nvme.files, nvme.times = files, 1
    assert not found_by_verify(world)


@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_whose_second_read_is_wrong_too_is_damaged(codec: Codec) -> None:
    world, nvme = nvme_alone(codec)
    nvme.files, nvme.times = IMAGE, 2
    world.settle()
    assert damage(world, "nvme") is not None
    assert is_noted(world), "the next start has to know it, too"
