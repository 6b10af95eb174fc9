"""``init`` and ``schema``: the YAML file before there is a run. This module imports no torch.

The file is ``TEMPLATE`` with the answers in it. The size of an image follows from the number of parameters, as in
``plan``: with Adam in mixed precision.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import typer
import yaml

from tierfall.cli.usage import Exit, at_terminal, parser_of, print_out, refuse, to_document
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address, parse_every
from tierfall.core.types.errors import BackendError, ConfigError
from tierfall.core.types.units import format_period, format_size
from tierfall.plan.layout import Optimizer, Precision, terms_of
from tierfall.plan.models import parse_parameters
from tierfall.tiers.host_folder import default_folder, measure_room

T = TypeVar("T")
DISK, EVERY_S, LOSE_S, LOSE_SAVES = "./checkpoints", 600.0, 3600.0, 10
BYTES_A_PARAMETER = sum(term.bytes for term in terms_of(Precision.BF16, Optimizer.ADAM))
KEPT = 3
RANKS_A_MACHINE = 8
"""So many ranks are taken to share a machine, where there are more."""
MEMORY = "the memory of this machine"
_MIB, _GIB = 1 << 20, 1 << 30
TEMPLATE = """\
# Where the checkpoints of this run go. Written by tierfall; change what you like.
# Every key: https://github.com/tierfall/tierfall/blob/main/docs/configuration.md
{notes}run: {run}
interval: {{every: {every}}}  # {unit}; a killed process loses no more than that
tiers:  # fastest first
  # Memory of the machine, which outlives the training process: saves go here, and return at once.
  # {size}
  - {{name: host, kind: host{capacity}}}
{tiers}
"""
_NO_FAR = """\
  # Nothing here survives the loss of the machine. Name a folder of a network file system, or a bucket:
  # - {name: far, kind: object, url: "s3://bucket/checkpoints", flush: {every: 6}, retain: {last: 3}}"""


def write_tier(comment: str, *keys: str) -> str:
    """Write one tier of the file; ``keys`` are its lines, the name first."""
    return "\n".join([f"  # {comment}", f"  - {keys[0]}", *(f"    {key}" for key in keys[1:])])


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
    if beyond:
        least = LOSE_SAVES * often if isinstance(often, int) else max(often, LOSE_S)
        what = "If this machine is lost, how much training may be lost"
        lose = answer(lose, what, shown_every(least), parse_every)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.absolute().parent.name).lstrip("._-")[:100]
    answers = Answers(
        run=run or name or "run",
        disks=tuple(places),
        far=beyond or None,
        parameters=count or None,
        ranks=ranks,
        every=often,
        lose=often if lose is None else lose,
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
    image, examples = answers.image_bytes, []
    check = (
        f"tierfall check --config {file} --image {'1GiB' if image is None else exact_size(image)}"
    )
    if image is None:
        examples.append("--image is the size of one rank's image")
    if isinstance(answers.every, int):
        check += " --step-time 1s"
        examples.append("--step-time the time of a training step")
    else:
        check += f" --save-every {shown_every(answers.every)}"
    check += "" if answers.ranks == 1 else f" --ranks {answers.ranks}"
    if as_json:
        document = {
            "file": str(file),
            "image_bytes": image,
            "capacity_bytes": capacity_bytes(answers, free),
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


def schema(as_json: bool) -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


# Answers ---------------------------------------------------------------------------------------------


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
    def host_bytes(self) -> int | None:
        """Two images of one rank, and a tenth more, in whole MiB: one is captured while the other is flushed."""
        image = self.image_bytes
        return None if image is None else -(-image * 2 * 11 // 10 // _MIB) * _MIB

    @property
    def ranks_here(self) -> int:
        return min(self.ranks, RANKS_A_MACHINE)

    @property
    def flush_every(self) -> int:
        """How many saves one copy to ``far`` stands for, so that a loss of the machine costs no more than ``lose``."""
        if isinstance(self.every, int) is not isinstance(self.lose, int):
            return 1
        return max(1, int(self.lose // self.every))

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all tiers."""
        far = () if self.far is None or is_address(self.far) else (self.far,)
        return (*self.disks, *far)


def exact_size(size_bytes: int) -> str:
    """Write a size, in whole MiB or GiB, rounded up, as the file accepts it."""
    if size_bytes < 10 * _GIB:
        return f"{-(-size_bytes // _MIB)}MiB"
    return f"{-(-size_bytes // _GIB)}GiB"


def shown_every(every: int | float) -> str:
    """Write an interval as the file accepts it: ``100``, ``10m``."""
    return str(every) if isinstance(every, int) else format_period(every)


def _told(every: int | float) -> str:
    return f"{every} steps" if isinstance(every, int) else format_period(every)


# The machine -----------------------------------------------------------------------------------------


def measure_free(answers: Answers, base: Path) -> dict[str, int]:
    """Measure what is free, in bytes: in the file system of host memory, in ``MEMORY``, and in the folders, of which
    relative ones start at ``base``; without what is not known."""
    found: dict[str, int | None] = {}
    folder = default_folder()
    try:
        room = measure_room(folder if folder.is_dir() else folder.parent)
    except BackendError:
        room = None
    if room is not None:
        found = {
            str(folder.parent): room.file_system_free_bytes,
            MEMORY: room.memory_free_bytes,
        }
    for place in answers.folders:
        at = _at(place, base)
        here = next((p for p in (at, at.parent) if p.is_dir()), None)
        if here is not None:  # else its file system may not be mounted
            found[place] = shutil.disk_usage(here).free
    return {place: free for place, free in found.items() if free is not None}


def _at(place: str, base: Path) -> Path:
    return (base / os.path.expanduser(place)).absolute()


def _create_folders(answers: Answers, base: Path) -> Iterator[str]:
    """Create a missing folder whose parent exists; yield a note on each other one. A parent that is missing may be a
    file system that is not mounted."""
    for place in answers.folders:
        try:
            _at(place, base).mkdir(exist_ok=True)
        except FileNotFoundError:
            yield f"{_at(place, base).parent} does not exist: mount it, or create it"
        except OSError as error:
            yield f"{place} cannot be created: {error.strerror}"


def capacity_bytes(answers: Answers, free: Mapping[str, int]) -> int | None:
    """Recommend a capacity of the host tier, per rank; None if the first save is to decide: the image is not known, or
    two do not fit into what is free."""
    needed = answers.host_bytes
    shared = str(default_folder().parent)
    room = min((free[place] for place in (shared, MEMORY) if place in free), default=None)
    fits = needed is not None and (room is None or needed * answers.ranks_here <= room)
    return needed if fits else None


def write_first_file(answers: Answers, free: Mapping[str, int]) -> str:
    """Write the YAML file, with comments that say why each line is there."""
    capacity, image = capacity_bytes(answers, free), answers.image_bytes
    size = "It takes two images, and a third if saves wait and there is room; capacity: 16GiB would set it."
    if capacity is not None and image is not None:
        of = "" if answers.ranks == 1 else f", divided among {answers.ranks} ranks"
        size = (
            f"{answers.parameters:,} parameters of {BYTES_A_PARAMETER} bytes (Adam, mixed precision){of}: room for two "
            f"images of {format_size(image)}, per rank."
        )
    elif image is not None:
        size = f"Two images of {format_size(image)}, one rank's, do not fit into what is free here now."
    names = (
        ["disk"] if len(answers.disks) == 1 else [f"disk{n + 1}" for n in range(len(answers.disks))]
    )
    tiers = [
        write_tier(
            "A disk of this machine: survives a reboot, not the loss of the machine.",
            f"name: {name}",
            "kind: file",
            f"path: {json.dumps(path)}",
            f"retain: {{last: {KEPT}}}  # the newest {KEPT}; older ones are deleted",
        )
        for name, path in zip(names, answers.disks, strict=True)
    ]
    tiers.append(_NO_FAR if answers.far is None else _far(answers, answers.far))
    in_steps = isinstance(answers.every, int)
    return TEMPLATE.format(
        notes="",
        run=json.dumps(answers.run),
        every=shown_every(answers.every),
        unit="training steps" if in_steps else "at the first step after that time",
        size=size,
        capacity="" if capacity is None else f", capacity: {exact_size(capacity)}",
        tiers="\n".join(tiers),
    )


def _far(answers: Answers, far: str) -> str:
    place = ["kind: file", f"path: {json.dumps(far)}"]
    place.append("shared: true  # all nodes see the same files")
    if is_address(far):
        place = ["kind: object  # credentials are found where the AWS command line finds them"]
        place.append(f"url: {json.dumps(far)}")
    every = answers.flush_every
    lost = "" if every == 1 else f": a copy each {_told(every * answers.every)}"
    return write_tier(
        "Survives the loss of the machine.",
        "name: far",
        *place,
        f"flush: {{every: {every}}}  # of the saved checkpoints, not steps{lost}",
        f"retain: {{last: {KEPT}}}",
    )


def notes_on(answers: Answers, free: Mapping[str, int]) -> Iterator[str]:
    """Yield what is too small on this machine, with what helps, and what the answers leave open."""
    shared = str(default_folder().parent)
    here, image, images = answers.ranks_here, answers.image_bytes, answers.host_bytes
    of = "" if answers.ranks == 1 else f" of {here} ranks on this machine"
    what, needed = "all but small models", _GIB
    if images is not None:
        what, needed = f"two images{of}", images * here
    raising = (
        "raise it (of a container: docker run --shm-size=SIZE; of a machine: mount -o remount,size=SIZE "
        f"{shared}), or write folder: PATH into the host tier's line, on another file system in memory"
    )
    needs = {shared: (what, needed, raising)}
    if image is not None:
        needs[MEMORY] = what, needed, "train with more ranks on more machines"
        for place in answers.folders:
            ranks = answers.ranks if place == answers.far else here
            needs[place] = (
                f"{KEPT} checkpoints and one that arrives",
                (KEPT + 1) * image * ranks,
                "name a larger one, or write a smaller number into its retain",
            )
    for place, (what, needed, help) in needs.items():
        if (left := free.get(place)) is not None and left < needed:
            yield (
                f"{place} is too small: {what} need {format_size(needed)}, {format_size(left)} are free: {help}"
            )
    if answers.far is None:
        yield "nothing survives the loss of this machine: name a folder of a network file system, or a bucket, by --far"
    elif is_address(answers.far):
        yield "an object store needs its libraries: pip install 'tierfall[object]'"
    alike = isinstance(answers.every, int) is isinstance(answers.lose, int)
    if alike and answers.lose < answers.every:
        yield (
            f"the loss of the machine may cost {_told(answers.every)}, not {_told(answers.lose)}: save more often, by "
            f"--every {shown_every(answers.lose)}"
        )
