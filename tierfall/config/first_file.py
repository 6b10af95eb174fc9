"""The first YAML file of a run, written from a few answers: what ``tierfall init`` computes. Pure: no I/O.

Sizes of images follow from the number of parameters: with Adam in mixed precision, a parameter is 2 bytes of weights, 4
of their fp32 master copy and 8 of two moments (Megatron-LM at a trillion parameters, SC'21: 13.7 bytes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from tierfall.config.fields import is_address
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_period, format_size

BYTES_A_PARAMETER = 14
PARAMETERS_MIN = 10_000
"""Fewer are a number without its unit."""
KEPT = 3
RANKS_A_MACHINE = 8
"""So many ranks are taken to share a machine, where there are more."""
EXPECTED_PARAMETERS = "a number of parameters such as 125M, 7B or 1.5e9"
_PARAMETERS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kKmMbBtT]?)")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MIB, _GIB = 1 << 20, 1 << 30
_SMALL_BYTES = _GIB


def parse_parameters(text: str) -> int:
    """Parse a number of parameters: ``125M``, ``7B``. Raises ConfigError."""
    found = _PARAMETERS.fullmatch(text.strip())
    count = int(Decimal(found[1]) * _SCALES[found[2].lower()]) if found else 0
    if not 0 < count < 10**15:
        raise ConfigError(f"{text!r} does not fit; expected {EXPECTED_PARAMETERS}")
    if count < PARAMETERS_MIN:
        plain = text.strip()
        guess = f"{plain} or {plain}B? " if not plain[-1].isalpha() else f"{plain}: "
        raise ConfigError(
            f"{guess}expected {EXPECTED_PARAMETERS}; of a model with less than {PARAMETERS_MIN:,}, leave it unknown"
        )
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a user says about a run. ``every`` and ``lose`` are steps (int) or seconds (float).

    ``disks`` are folders of this machine, the fastest first; ``far``, a folder or an address, survives the machine.
    ``parameters`` is None where it is not known; the first save then decides how much memory is taken.
    """

    run: str
    disks: tuple[str, ...]
    far: str | None
    parameters: int | None
    ranks: int
    every: int | float
    lose: int | float

    @property
    def image_bytes(self) -> int | None:
        """Estimate one rank's image."""
        if self.parameters is None:
            return None
        return -(-self.parameters * BYTES_A_PARAMETER // self.ranks)

    @property
    def ranks_here(self) -> int:
        return min(self.ranks, RANKS_A_MACHINE)

    @property
    def flush_every(self) -> int:
        """How many saves one copy to ``far`` stands for, so that a loss of the machine costs no more than ``lose``."""
        if isinstance(self.every, int) is not isinstance(self.lose, int):
            return 1
        return max(1, int(self.lose // self.every))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSpace:
    """What is free on the machine; None, or no entry, where that is not known. ``disks`` is by folder."""

    memory_folder: str
    shared_memory_bytes: int | None
    memory_bytes: int | None
    disks: Mapping[str, int]

    def images(self, answers: Answers) -> int:
        """How many images of each rank host memory has room for: 0, 1 or 2."""
        known = [b for b in (self.shared_memory_bytes, self.memory_bytes) if b is not None]
        if answers.image_bytes is None or not known:
            return 2
        room = min(known) // answers.ranks_here
        return sum(room >= _capacity_bytes(answers.image_bytes, images) for images in (1, 2))


def _capacity_bytes(image_bytes: int, images: int) -> int:
    """A tenth more than the images, in whole MiB."""
    return -(-image_bytes * images * 11 // 10 // _MIB) * _MIB


def exact_size(size_bytes: int) -> str:
    """Write a size, in whole MiB or tenths of a GiB, rounded up, as the file accepts it."""
    if size_bytes < 10 * _GIB:
        return f"{-(-size_bytes // _MIB)}MiB"
    return f"{-(-size_bytes // _GIB)}GiB"


def capacity_bytes(answers: Answers, free: FreeSpace) -> int | None:
    """Recommend a capacity of the host tier, per rank; None where the first save should decide, or nothing fits."""
    images = free.images(answers)
    if answers.image_bytes is None or images == 0:
        return None
    return _capacity_bytes(answers.image_bytes, images)


def shown_every(every: int | float) -> str:
    """Write an interval as the file accepts it: ``100``, ``10m``."""
    return str(every) if isinstance(every, int) else format_period(every)


def _told(every: int | float) -> str:
    return f"{every} steps" if isinstance(every, int) else format_period(every)


# The file --------------------------------------------------------------------------------------------


def write_first_file(answers: Answers, free: FreeSpace) -> str:
    """Write the YAML file, with comments that say why each line is there."""
    return "\n".join([*_head(answers), *_host(answers, free), *_disks(answers), *_far(answers), ""])


def _head(answers: Answers) -> Iterator[str]:
    unit = (
        "training steps" if isinstance(answers.every, int) else "at the first step after that time"
    )
    yield "# Where the checkpoints of this run go. Written by tierfall init; change what you like."
    yield "# Every key: https://github.com/tierfall/tierfall/blob/main/docs/configuration.md"
    yield f"run: {json.dumps(answers.run)}"
    yield f"interval: {{every: {shown_every(answers.every)}}}  # {unit}; a killed process loses no more than that"
    yield "tiers:  # fastest first"


def _host(answers: Answers, free: FreeSpace) -> Iterator[str]:
    yield "  # Memory of the machine, which outlives the training process: saves go here, and return at once."
    capacity, image = capacity_bytes(answers, free), answers.image_bytes
    if capacity is None or image is None:
        if image is not None:
            yield f"  # An image of {format_size(image)} does not fit into what is free here now."
        yield "  # It takes 2.2 times the first image, at most half of what is free; capacity: 16GiB would set it."
        yield "  - {name: host, kind: host}"
        return
    of = "" if answers.ranks == 1 else f", divided among {answers.ranks} ranks"
    yield (
        f"  # {answers.parameters:,} parameters of {BYTES_A_PARAMETER} bytes (Adam, mixed precision){of}: an image of "
        f"{format_size(image)}."
    )
    if free.images(answers) == 2:
        yield "  # Room for two of them, per rank: one is captured while the other is flushed."
    else:
        yield "  # Room for one, per rank, since no more is free: a save waits until the one before is flushed."
    yield f"  - {{name: host, kind: host, capacity: {exact_size(capacity)}}}"


def _disks(answers: Answers) -> Iterator[str]:
    for number, path in enumerate(answers.disks, 1):
        name = "disk" if len(answers.disks) == 1 else f"disk{number}"
        yield "  # A disk of this machine: survives a reboot, not the loss of the machine."
        yield f"  - name: {name}"
        yield "    kind: file"
        yield f"    path: {json.dumps(path)}"
        yield f"    retain: {{last: {KEPT}}}  # the newest {KEPT}; older ones are deleted"


def _far(answers: Answers) -> Iterator[str]:
    if answers.far is None:
        yield "  # Nothing here survives the loss of the machine. Name a folder of a network file system, or a bucket:"
        yield '  # - {name: far, kind: object, url: "s3://bucket/checkpoints", flush: {every: 6}, retain: {last: 3}}'
        return
    place = json.dumps(answers.far)
    yield "  # Survives the loss of the machine."
    yield "  - name: far"
    if is_address(answers.far):
        yield "    kind: object  # credentials are found where the AWS command line finds them"
        yield f"    url: {place}"
    else:
        yield "    kind: file"
        yield f"    path: {place}"
        yield "    shared: true  # all nodes see the same files"
    lost = (
        ""
        if answers.flush_every == 1
        else f": a copy each {_told(answers.flush_every * answers.every)}"
    )
    yield f"    flush: {{every: {answers.flush_every}}}  # of the saved checkpoints, not steps{lost}"
    yield f"    retain: {{last: {KEPT}}}"


# What to look at -------------------------------------------------------------------------------------


def notes_on(answers: Answers, free: FreeSpace) -> list[str]:
    """Name what is too small on this machine, and what the answers leave open."""
    return [*_memory_notes(answers, free), *_disk_notes(answers, free), *_loss_notes(answers)]


def _memory_notes(answers: Answers, free: FreeSpace) -> Iterator[str]:
    image, shared, memory = answers.image_bytes, free.shared_memory_bytes, free.memory_bytes
    place = free.memory_folder
    helps = (
        "raise it (of a container: docker run --shm-size=SIZE; of a machine: mount -o remount,size=SIZE "
        f"{place}), or write folder: PATH into the host tier's line, on another file system in memory"
    )
    if image is None:
        if shared is not None and shared < _SMALL_BYTES:
            yield f"{place} has {format_size(shared)} free, enough for small models only: {helps}"
        return
    needed = _capacity_bytes(image, 2) * answers.ranks_here
    of = "" if answers.ranks == 1 else f" of {answers.ranks_here} ranks on this machine"
    what = f"two images{of} need {format_size(needed)}"
    if shared is not None and shared < needed:
        yield f"{place} is too small: {what}, {format_size(shared)} are free: {helps}"
    if memory is not None and memory < needed:
        yield f"memory is short: {what}, {format_size(memory)} are free: train with more ranks on more machines"


def _disk_notes(answers: Answers, free: FreeSpace) -> Iterator[str]:
    if answers.image_bytes is None:
        return
    for path, left in free.disks.items():
        ranks = answers.ranks if path == answers.far else answers.ranks_here
        needed = (KEPT + 1) * answers.image_bytes * ranks
        if left < needed:
            yield (
                f"{path} is too small: {KEPT} checkpoints and one that arrives need {format_size(needed)}, "
                f"{format_size(left)} are free: name a larger one, or write a smaller number into its retain"
            )


def _loss_notes(answers: Answers) -> Iterator[str]:
    if answers.far is None:
        yield "nothing survives the loss of this machine: name a folder of a network file system, or a bucket, by --far"
        return
    if is_address(answers.far):
        yield "an object store needs its libraries: pip install 'tierfall[object]'"
    alike = isinstance(answers.every, int) is isinstance(answers.lose, int)
    if alike and answers.lose < answers.every:
        yield (
            f"the loss of the machine may cost {_told(answers.every)}, not {_told(answers.lose)}: save more often, by "
            f"--every {shown_every(answers.lose)}"
        )
