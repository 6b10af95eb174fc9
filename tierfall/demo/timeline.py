"""The data of the picture, from the event log and the trainers' own output, and where the picture is written.

Times are in seconds since the start of the first trainer. ``picture`` draws it, if matplotlib is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.markup import escape

from tierfall.core.types.values import CheckpointId
from tierfall.demo.chain import HOST, TIERS
from tierfall.demo.process import Act, DemoError, id_of
from tierfall.demo.screen import Screen

KEPT = "timeline.png"
LOOSE = "tierfall-demo.png"


class Kind(StrEnum):
    """The meaning of a bar."""

    CAPTURE = "capture"
    FLUSH = "flush"
    CUT = "flush cut off by the kill"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Work on one tier, from ``begin_s`` to ``end_s``, for the checkpoint of training step ``step``."""

    tier: str
    kind: Kind
    step: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The life of one trainer, and, of each step that it trained, when it was over and its loss."""

    begin_s: float
    end_s: float
    steps: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run on its tiers, fastest first; ``moments`` are its events with their times."""

    tiers: tuple[str, ...]
    bars: tuple[Bar, ...]
    processes: tuple[Process, ...]
    moments: tuple[tuple[float, str], ...]


Copy = tuple[CheckpointId, str]


def make_timeline(
    acts: Sequence[Act], *, found: Collection[Copy], moments: Sequence[tuple[float, str]] = ()
) -> Timeline:
    """Put together what the trainers did, in the order in which they lived. ``found`` are the copies, each by its
    checkpoint and tier, that were whole when a trainer had been killed."""
    origin_s = acts[0].began_s
    kills = [(act.over_s, "SIGKILL") for act in acts if act.was_killed]
    return Timeline(
        tiers=TIERS,
        bars=tuple(bar for act in acts for bar in _bars(act, origin_s, found)),
        processes=tuple(_process(act, origin_s) for act in acts),
        moments=tuple((time_s - origin_s, what) for time_s, what in sorted([*moments, *kills])),
    )


def _bars(act: Act, origin_s: float, found: Collection[Copy]) -> Iterator[Bar]:
    """A bar from the line that reports a begin to the line that reports its end, or to the kill."""
    begun: dict[Copy, float] = {}

    def bar(kind: Kind, copy: Copy, begin_s: float, end_s: float) -> Bar:
        return Bar(
            tier=copy[1],
            kind=kind,
            step=copy[0].step,
            begin_s=begin_s - origin_s,
            end_s=end_s - origin_s,
        )

    for line in act.lines:
        now_s, tier = line["wall_time_s"], line.get("tier", HOST)
        match line["kind"]:
            case "save_begun" | "flush_begun":
                begun[id_of(line), tier] = now_s
            case "captured" | "committed" if (copy := (id_of(line), tier)) in begun:
                kind = Kind.CAPTURE if line["kind"] == "captured" else Kind.FLUSH
                yield bar(kind, copy, begun.pop(copy), now_s)
            case "flush_failed" | "flush_given_up":
                begun.pop((id_of(line), tier), None)
            case "restored":
                for source in line["sources"]:
                    copy = id_of(line), source
                    yield bar(Kind.RESTORE, copy, now_s - line["seconds"], now_s)
    for copy, begin_s in begun.items() if act.was_killed else ():
        if copy[1] != HOST:
            yield bar(Kind.FLUSH if copy in found else Kind.CUT, copy, begin_s, act.over_s)


def _process(act: Act, origin_s: float) -> Process:
    return Process(
        begin_s=act.began_s - origin_s,
        end_s=act.over_s - origin_s,
        steps=tuple(
            (line["wall_time_s"] - origin_s, float.fromhex(line["loss"])) for line in act.of("step")
        ),
    )


# The picture ------------------------------------------------------------------------------------------


def picture_path(folder: Path | None, wanted: Path | None) -> Path:
    """Return the path of the picture: the requested one, else in the kept folder, else in the working directory. Raises
    DemoError, before any training, if no file can be written there."""
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
    """Write the picture and print its path; if that fails, print why, and return None."""
    try:
        picture = importlib.import_module("tierfall.demo.picture")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        screen.print("  for a picture of this timeline: pip install " + escape("'tierfall[plot]'"))
        return None
    try:
        picture.write_picture(timeline, path)
    except OSError as error:
        reason = escape(f"{path} cannot be written ({error.strerror or error})")
        screen.print(f"  [yellow]no picture: {reason}[/yellow]; --picture FILE names another place")
        return None
    shown = f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)
    screen.print(f"  the timeline as a picture: [bold]{escape(shown)}[/bold]")
    return path
