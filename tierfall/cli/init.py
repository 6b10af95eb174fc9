"""``init`` and ``schema``: the YAML file before there is a run. This module imports no torch.

What is written is computed without I/O, below. Sizes of images follow from the number of parameters: with Adam in mixed
precision, a parameter is 2 bytes of weights, 4 of their fp32 master copy and 8 of two moments (Megatron-LM at a
trillion parameters, SC'21: 13.7 bytes).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import typer
import yaml

from tierfall.cli.usage import Exit, at_terminal, parser_of, print_out, refuse, to_document
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address, parse_every
from tierfall.core.types.errors import BackendError, ConfigError
from tierfall.core.types.units import format_period, format_size
from tierfall.tiers.host_folder import default_folder, measure_room

T = TypeVar("T")
DISK, EVERY_S, LOSE_S, LOSE_SAVES = "./checkpoints", 600.0, 3600.0, 10
CHECK_IMAGE, CHECK_STEP = "1GiB", "1s"
"""Examples for the command that is advised, where the model's size, or the time of a step, is not known."""


def init(
    file: Path,
    disk: list[str] | None,
    far: str | None,
    parameters: int | None,
    ranks: int,
    every: float | None,
    lose: float | None,
    run: str | None,
    yes: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Ask for what no option says, and write the file. ``far`` is empty: none; ``parameters`` is 0: unknown."""
    if file.is_dir():
        refuse(f"init: {file} is a folder; name the file in it: {file / 'tiers.yaml'}", Exit.USAGE)
    if not file.parent.is_dir():
        refuse(f"init: {file}: there is no folder {file.parent}; create it first", Exit.USAGE)
    if file.exists() and not force:
        refuse(f"init: {file} exists; --force replaces it", Exit.USAGE)
    asking = not yes and not as_json and at_terminal()

    def answer(given: T | None, text: str, default: str, parse: Callable[[str], T]) -> T:
        if given is not None:
            return given
        if not asking:
            return parse(default)
        answered: T = typer.prompt(text, default=default, value_proc=parser_of(parse))
        return answered

    places = answer(disk, "Folders of this machine's disks, fastest first", DISK, _places)
    what = "What survives this machine (a network folder, or s3://bucket/prefix)"
    beyond = answer(far, what, "none", parse_far)
    count = answer(parameters, "Parameters of the model (125M, 7B)", "unknown", parse_parameters)
    often = answer(
        every, "Save every (steps: 100, or a time: 10m)", shown_every(EVERY_S), parse_every
    )
    answers = Answers(
        run=run or _name_of(file),
        disks=tuple(places),
        far=beyond or None,
        parameters=count or None,
        ranks=ranks,
        every=often,
        lose=often
        if not beyond
        else answer(
            lose,
            "If this machine is lost, how much training may be lost",
            shown_every(LOSE_SAVES * often if isinstance(often, int) else max(often, LOSE_S)),
            parse_every,
        ),
    )
    _write(file, answers, as_json)


def _write(file: Path, answers: Answers, as_json: bool) -> None:
    """Write the file, create the folders of its tiers, and say what to look at."""
    free = measure_free(answers, file.parent)
    text = write_first_file(answers, free)
    load_config(yaml.safe_load(text))  # raises before anything is changed
    notes = [*_create_folders(answers, file.parent), *notes_on(answers, free)]
    try:
        file.write_text(text)
    except OSError as error:
        refuse(f"init: {file} cannot be written: {error.strerror}")
    image, capacity = answers.image_bytes, capacity_bytes(answers, free)
    ranks = "" if answers.ranks == 1 else f" --ranks {answers.ranks}"
    shown_image = CHECK_IMAGE if image is None else exact_size(image)
    examples = ["--image is the size of one rank's image"] if image is None else []
    pace = f"--save-every {shown_every(answers.every)}"
    if isinstance(answers.every, int):
        pace = f"--step-time {CHECK_STEP}"
        examples.append("--step-time the time of a training step")
    check = f"tierfall check --config {file} --image {shown_image} {pace}{ranks}"
    if as_json:
        document = {
            "file": str(file),
            "image_bytes": image,
            "capacity_bytes": capacity,
            "notes": notes,
            "check": check,
        }
        print_out(to_document(document, [], indent=2) + "\n")
        return
    sizes = "" if image is None else f": an image of {format_size(image)} on each rank"
    lines = [f"wrote {file}{sizes}", *(f"note: {note}" for note in notes)]
    if notes:
        lines.append(f"to change {file.name}, edit it, or repeat tierfall init with --force")
    lines.append(f"next: {check}")
    if examples:
        lines.append(f"      ({', '.join(examples)}: put yours there)")
    print_out("\n".join(lines) + "\n")


def _places(text: str) -> list[str]:
    return [parse_disk(part) for part in text.split(",")]


def parse_disk(text: str) -> str:
    """Parse a folder of this machine. Raises ConfigError."""
    place = text.strip()
    if not place:
        raise ConfigError(f"{text!r} names no folder; expected folders, such as {DISK}")
    if is_address(place):
        raise ConfigError(f"{place} is no folder of this machine: name it by --far")
    if "," in place:
        raise ConfigError(f"{place!r} has a comma: give --disk once for each folder")
    return place


def parse_far(text: str) -> str:
    """Parse a place that survives this machine; empty: there is none."""
    return "" if text.strip() == "none" else text.strip()


def _name_of(file: Path) -> str:
    """Name the run by the folder of its file."""
    return (
        re.sub(r"[^A-Za-z0-9._-]+", "-", file.absolute().parent.name).lstrip("._-")[:100] or "run"
    )


# The machine -----------------------------------------------------------------------------------------


def measure_free(answers: Answers, base: Path) -> FreeSpace:
    """Measure what is free in memory, and on the disks that are named; relative ones start at ``base``."""
    folder = default_folder()
    try:
        room = measure_room(folder if folder.is_dir() else folder.parent)
    except BackendError:
        room = None
    disks = {}
    for place in _folders(answers):
        at = _at(place, base)
        here = next((p for p in (at, at.parent) if p.is_dir()), None)
        if here is not None:  # else its file system may not be mounted
            disks[place] = shutil.disk_usage(here).free
    return FreeSpace(
        memory_folder=str(folder.parent),
        shared_memory_bytes=room.file_system_free_bytes if room else None,
        memory_bytes=room.memory_free_bytes if room else None,
        disks=disks,
    )


def _folders(answers: Answers) -> Iterator[str]:
    yield from answers.disks
    if answers.far is not None and not is_address(answers.far):
        yield answers.far


def _at(place: str, base: Path) -> Path:
    return (base / os.path.expanduser(place)).absolute()


def _create_folders(answers: Answers, base: Path) -> Iterator[str]:
    """Create a missing folder whose parent exists; yield a note on each other one. A parent that is missing may be a
    file system that is not mounted."""
    for place in _folders(answers):
        try:
            _at(place, base).mkdir(exist_ok=True)
        except FileNotFoundError:
            yield f"{_at(place, base).parent} does not exist: mount it, or create it"
        except OSError as error:
            yield f"{place} cannot be created: {error.strerror}"


def schema(as_json: bool) -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


# What the answers mean -------------------------------------------------------------------------------


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
    """Parse a number of parameters: ``125M``, ``7B``; 0: it is unknown. Raises ConfigError."""
    if text.strip() in ("", "unknown"):
        return 0
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
        yield "  # It takes two images, and a third if saves wait and there is room; capacity: 16GiB would set it."
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
