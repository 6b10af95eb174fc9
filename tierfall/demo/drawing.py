"""Where the demo's picture goes, and drawing it where matplotlib is installed; without it the demo is as good."""

from __future__ import annotations

import importlib
from pathlib import Path

from rich.markup import escape

from tierfall.demo.process import DemoError
from tierfall.demo.screen import Screen
from tierfall.demo.timeline import Timeline

KEPT = "timeline.png"
LOOSE = "tierfall-demo.png"


def picture_path(folder: Path | None, wanted: Path | None) -> Path:
    """Say where the picture goes: where it is wanted, else into the folder that is kept, else to the working directory.

    Raises DemoError, before anything is trained for it, where no file can be there.
    """
    if wanted is None:
        return Path.cwd() / LOOSE if folder is None else folder / KEPT
    path = wanted.expanduser().absolute()
    if path.suffix.lower() != ".png":
        raise DemoError(f"--picture {wanted}: the picture is a PNG: name a file that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise DemoError(f"--picture {wanted}: {what}: name a file in a folder that is there")
    return path


def draw_picture(screen: Screen, timeline: Timeline, path: Path) -> Path | None:
    """Write the picture and say where it is; where that cannot be, say why, and return None."""
    try:
        picture = importlib.import_module("tierfall.demo.picture")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        screen.say("  for a picture of this timeline: pip install " + escape("'tierfall[plot]'"))
        return None
    try:
        picture.write_picture(timeline, path)
    except OSError as error:
        reason = escape(f"{path} cannot be written ({error.strerror or error})")
        screen.say(f"  [yellow]no picture: {reason}[/yellow]; --picture FILE names another place")
        return None
    shown = f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)
    screen.say(f"  the timeline as a picture: [bold]{escape(shown)}[/bold]")
    return path
