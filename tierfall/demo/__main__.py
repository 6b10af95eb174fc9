"""The arguments of ``tierfall demo``, which is also ``python -m tierfall.demo``. It imports torch only to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SAVES = 12
"""How often the demo saves."""


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="A new or empty folder to keep everything in. Without it, a temporary one that is removed.",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=SAVES, help=f"Steps to train, rounded up to a multiple of {SAVES}."),
    ] = 120,
    s3: Annotated[
        bool,
        typer.Option(
            "--s3",
            help="Use a bucket of a real S3 server as the last tier. The server runs for as long as the demo.",
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the timeline as PNG. Without it, DIR/timeline.png or ./tierfall-demo.png.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the report on stderr, and one JSON document at the end on stdout."
        ),
    ] = False,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
) -> None:
    """Train a small real model through a chain of tiers, kill it, restore it, and show that nothing was lost."""
    from tierfall.demo.command import play

    play(folder, -(-steps // SAVES), s3, picture, as_json, small)


if __name__ == "__main__":
    typer.run(demo)
