"""``tierfall demo``: its arguments, its folder, its order of acts, and what it leaves behind."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tierfall.core.units import format_duration
from tierfall.demo import story
from tierfall.demo.chain import SLOW, TIERS, Chain, write_chain
from tierfall.demo.model import Gpt, parameter_count
from tierfall.demo.process import DemoError
from tierfall.demo.screen import Screen
from tierfall.demo.story import Stage
from tierfall.demo.training import NORMAL, SMALL, Plan

SAVES = 12
BYTES_A_PARAMETER = 12
"""A parameter and its two moments, in fp32."""


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="A new or empty folder to keep everything in. Without it, a temporary one that is removed.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=SAVES, help=f"Steps to train, rounded up to a multiple of {SAVES}.")
    ] = 120,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Tell the story on stderr, and end with one JSON document on stdout."
        ),
    ] = False,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
) -> None:
    """Train a small real model through a chain of tiers, kill it, restore it, and show that nothing was lost."""
    every = -(-steps // SAVES)
    plan = SMALL if small else NORMAL
    screen = Screen(TIERS, aside=as_json)
    try:
        parameters = parameter_count(Gpt(plan.shape))
        image_bytes = BYTES_A_PARAMETER * parameters
        with _folder(folder) as place, _chain(place, plan, every, image_bytes) as chain:
            stage = Stage(screen=screen, chain=chain, steps=every * SAVES, every=every, small=small)
            facts = _play(stage, parameters, kept=folder)
    except DemoError as error:
        screen.say(f"\n[bold red]The demo failed:[/bold red] {escape(str(error))}")
        if as_json:
            typer.echo(json.dumps({"ok": False, "problems": [str(error)]}, indent=2))
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(facts | {"ok": True, "problems": []}, indent=2))


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Give the folder to work in; a temporary one is removed at the end."""
    if given is None:
        with _usable("the temporary folder"):
            temporary = tempfile.TemporaryDirectory(prefix="tierfall-demo-")
        with temporary as name:
            yield Path(name)
        return
    with _usable(given):
        given = given.expanduser().absolute()
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise DemoError(f"{given} is there already and not an empty folder: name a new one")
        given.mkdir(parents=True, exist_ok=True)
    yield given


@contextmanager
def _usable(folder: Path | str) -> Iterator[None]:
    """Tell in one line that a folder cannot be made, looked into or written to."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~ that leads to no home
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise DemoError(f"{folder} cannot be used ({reason}): name another folder") from error


@contextmanager
def _chain(folder: Path, plan: Plan, every: int, image_bytes: int) -> Iterator[Chain]:
    """Write the chain's file; shared memory is left clean, however the demo ends."""
    with _usable(folder):
        chain = write_chain(folder, plan, every=every, image_bytes=image_bytes)
    try:
        yield chain
    finally:
        chain.remove_memory()


def _play(stage: Stage, parameters: int, *, kept: Path | None) -> dict[str, Any]:
    """Play all acts; return what came of them."""
    began = time.monotonic()
    screen = stage.screen
    screen.say(
        f"A GPT of {parameters / 1e6:.1f} million parameters learns Python's help texts in {stage.steps} steps. "
        "Its checkpoints fall through this chain:"
    )
    screen.quote(stage.chain.config_path.read_text())
    screen.head(1, f"Train, saving every {stage.every} steps")
    first, cut = story.train_and_kill(stage)
    screen.head(3, "What each tier holds now")
    left = story.show_what_is_left(stage, cut)
    screen.head(4, "Start it again")
    again = story.go_on(stage, left)
    screen.head(5, "The same training without tierfall and without a kill")
    undisturbed = story.train_undisturbed(stage)
    before, after = story.compare(stage, first, again, undisturbed)
    screen.head(6, "Damage the nearest copy, and restore in a fresh process")
    fallen = story.damage_and_restore(stage, again)
    screen.head(7, "Summary")
    costs = story.sum_up(stage, (first, again))
    seconds = time.monotonic() - began
    screen.say(f"  the demo took {format_duration(seconds)}")
    _say_where_next(stage, kept)
    assert again.started is not None
    assert again.started.restored is not None
    return {
        "parameters": parameters,
        "steps": stage.steps,
        "killed": {"after_step": first.steps[-1].step, "copying": str(cut), "to": SLOW},
        "restored": asdict(again.started.restored),
        "equal_losses": {"before_the_kill": before, "after_the_restore": after},
        "beside_damage": asdict(fallen),
        **costs,
        "seconds": seconds,
        "folder": None if kept is None else str(kept),
    }


def _say_where_next(stage: Stage, kept: Path | None) -> None:
    say = stage.screen.say
    say()
    if kept is None:
        say("Keep the files and look at them: [bold]tierfall demo ./demo[/bold], then")
        say("    tierfall ls --config ./demo/tiers.yaml")
    else:
        say(f"Everything is in {kept}:")
        say(f"    tierfall ls --config {kept / 'tiers.yaml'}")
    say("Your own training: examples/train.py; every key of the file: docs/configuration.md")
