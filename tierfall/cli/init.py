"""``init`` and ``schema``: the YAML file before there is a run. This module imports no torch.

``tierfall.config.first_file`` computes what is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import typer
import yaml

from tierfall.cli.usage import Exit, print_out, refuse, to_document
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address, parse_every
from tierfall.config.first_file import (
    Answers,
    FreeSpace,
    capacity_bytes,
    exact_size,
    notes_on,
    parse_parameters,
    shown_every,
    write_first_file,
)
from tierfall.core.types.errors import BackendError, ConfigError
from tierfall.core.types.units import format_size
from tierfall.tiers.arena.folder import default_folder, room_for_arena

T = TypeVar("T")
DISK, EVERY_S, LOSE_S, LOSE_SAVES = "./checkpoints", 600.0, 3600.0, 10
CHECK_IMAGE, CHECK_STEP = "1GiB", "1s"
"""Examples for the command that is advised, where the model's size, or the time of a step, is not known."""


def init(
    file: Path,
    *,
    disks: list[str],
    far: str | None,
    parameters: str | None,
    ranks: int,
    every: str | None,
    lose: str | None,
    run: str | None,
    yes: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Ask for what no option says, and write the file."""
    if file.is_dir():
        refuse(f"init: {file} is a folder; name the file in it: {file / 'tiers.yaml'}", Exit.USAGE)
    if not file.parent.is_dir():
        refuse(f"init: {file}: there is no folder {file.parent}; create it first", Exit.USAGE)
    if file.exists() and not force:
        refuse(f"init: {file} exists; --force replaces it", Exit.USAGE)
    asking = not yes and not as_json and at_terminal()

    def answer(
        word: str,
        given: str | None,
        text: str,
        default: str,
        parse: Callable[[str], T],
        check: Callable[[T], object] = lambda value: None,
    ) -> T:
        def read(typed: str) -> T:
            try:
                check(value := parse(typed))
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from error  # it is asked again
            return value

        try:
            if given is not None or not asking:
                return parse(default if given is None else given)
        except ConfigError as error:
            refuse(f"{word}: {error}", Exit.USAGE)
        answered: T = typer.prompt(text, default=default, value_proc=read)
        return answered

    listed = ",".join(disks) or None
    places = answer(
        "--disk",
        listed,
        "Folders of this machine's disks, fastest first",
        DISK,
        _places,
        lambda places: _check_parents(places, file.parent),
    )
    beyond = answer(
        "--far",
        far,
        "What survives this machine (a network folder, or s3://bucket/prefix)",
        "none",
        lambda text: None if text.strip() in ("", "none") else text.strip(),
        lambda place: _check_parents(filter(None, [place]), file.parent),
    )
    count = answer(
        "--parameters",
        parameters,
        "Parameters of the model (125M, 7B)",
        "unknown",
        lambda text: None if text.strip() in ("", "unknown") else parse_parameters(text),
    )
    often = answer(
        "--every",
        every,
        "Save every (steps: 100, or a time: 10m)",
        shown_every(EVERY_S),
        parse_every,
    )
    answers = Answers(
        run=run or _name_of(file),
        disks=places,
        far=beyond,
        parameters=count,
        ranks=ranks,
        every=often,
        lose=often
        if beyond is None
        else answer(
            "--lose",
            lose,
            "If this machine is lost, how much training may be lost",
            _lose_by(often),
            parse_every,
        ),
    )
    _write(file, answers, as_json)


def _write(file: Path, answers: Answers, as_json: bool) -> None:
    """Write the file, create the folders of its tiers, and say what to look at."""
    free = measure_free(answers, file.parent)
    text = write_first_file(answers, free)
    load_config(
        yaml.safe_load(text)
    )  # an answer that does not fit is an error before anything is changed
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


def at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _places(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError(f"{text!r} names no folder; expected folders, such as {DISK}")
    if address := next(filter(is_address, found), None):
        raise ConfigError(f"{address} is no folder of this machine: name it by --far")
    return found


def _lose_by(every: int | float) -> str:
    return shown_every(LOSE_SAVES * every if isinstance(every, int) else max(every, LOSE_S))


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
        room = room_for_arena(folder if folder.is_dir() else folder.parent)
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


def _check_parents(places: Iterable[str], base: Path) -> None:
    """Raise ConfigError for a folder that cannot be created, since the one above it is missing."""
    for place in places:
        parent = _at(place, base).parent
        if not (is_address(place) or parent.is_dir()):
            raise ConfigError(
                f"{parent} does not exist: mount it, create it, or name another folder"
            )


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


def schema() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))
