"""``watch``: a live view of tiers, copies, transfers and events: by the trainer's status, or by a listing of the
tiers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierfall.cli.common import (
    CommandOutput,
    Part,
    cell,
    checkpoints_table,
    counted,
    table,
    with_tier,
)
from tierfall.cli.facts import RunFacts, load_settings, owner_members
from tierfall.cli.usage import Asked, Exit, refuse, to_document
from tierfall.config import Config
from tierfall.core.types.text import members, to_json
from tierfall.core.types.units import (
    format_duration,
    format_rate,
    format_share,
    format_size,
)
from tierfall.ops.reader import RunReader
from tierfall.ops.watch import LIST_EVERY_S, RankProcess, RunSnapshot, Watcher
from tierfall.policies.retention import used_metrics
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.figures import FIGURES, format_figure, of_run, of_tier
from tierfall.telemetry.prometheus import MetricsServer
from tierfall.telemetry.reports import describe_peer_survival, format_bounds
from tierfall.telemetry.status import (
    HANGS_AFTER_S,
    RunStatus,
    Status,
    TransferStatus,
)

ROWS_MAX = 12
EVENTS_SHOWN = 6
BAR, BAR_WIDTH = "PROGRESS", 20
TIME_MAX_S = 3e10
NUMBER_MAX = 1e18
_SHOWN_MEMBERS = ("bytes", "seconds", "outcome", "reason", "doing", "count")

ROWS_ON_SCREEN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One frame. ``problems`` name what could not be read, ``unread`` the tiers that could not. ``metrics`` are those
    that people see; None: all."""

    snapshot: RunSnapshot
    status: RunStatus
    unread: tuple[str, ...] = ()
    problems: tuple[str, ...]
    metrics: Sequence[str] | None = None

    @property
    def document(self) -> dict[str, Any]:
        status, found = self.status, self.status.statistics
        return {
            "run": status.run,
            "wall_time_s": self.snapshot.wall_time_s,
            "owner": owner_members(self.snapshot.owner),
            "slots": [_slot_members(self.snapshot, slot) for slot in self.snapshot.slots],
            "tiers": [
                {"name": tier, "kind": kind, **to_json(of_tier(found, tier))}
                for tier, kind in status.tiers.items()
            ],
            "checkpoints": [members(one) for one in status.checkpoints],
            **status.model_dump(mode="json", include={"checkpoints_known", "transfers"}),
            **(to_json(of_run(found)) if self.snapshot.live is not None else {}),
            **members(found, "newest", "loss_bound", "peer_survival"),
            "events": list(self.snapshot.events),
        }

    def rows(self, rows_max: int) -> int:
        """Return how many steps a frame with at most ``rows_max`` shows."""
        return min(rows_max, len(self.status.checkpoints))

    def shown(self, rows_max: int = ROWS_MAX, *, bars: bool = False) -> Iterator[Part]:
        """Give the lines and tables of a frame, the newest step first."""
        yield from _heading(self)
        yield ""
        seen = self.status
        yield _tier_table(seen, bars)
        for tier, reason in seen.statistics.failing.items():
            if reason:
                yield Text(with_tier(tier, reason), style="red")
        if seen.transfers:
            yield ""
            yield _transfer_table(seen.transfers, bars)
        rows = self.rows(rows_max)
        if rows:
            yield ""
            yield _grid(self, rows)
        if more := seen.checkpoints_known - rows:
            yield f"and {counted(more, 'older one', 'older ones')}"
        yield ""
        yield from format_bounds(seen.statistics.loss_bound, self.unread)
        if (found := seen.statistics.peer_survival) is not None:
            yield describe_peer_survival(found, live=self.snapshot.live is not None)
        if len(self.snapshot.slots) > 1 and any(s.owner or s.status for s in self.snapshot.slots):
            yield ""
            yield _slot_table(self.snapshot)
        if self.snapshot.events:
            yield ""
            yield from (_format_event(event) for event in self.snapshot.events[-EVENTS_SHOWN:])


def view_of_status(status: Status, snapshot: RunSnapshot) -> RunView:
    """Return the frame of a living trainer's status."""
    return RunView(
        snapshot=snapshot,
        status=_with_memory_of_all(status, snapshot),
        problems=snapshot.problems,
    )


def _with_memory_of_all(status: Status, snapshot: RunSnapshot) -> Status:
    """Count in the first tier, host memory, what all living ranks of this node have there."""
    ranks = [slot.status for slot in snapshot.slots if slot.status is not None and slot.alive]
    found, host = status.statistics, next(iter(status.tiers))
    used = sum(rank.statistics.used_bytes.get(host, 0) for rank in ranks)
    capacity = sum(rank.statistics.capacity_bytes.get(host) or 0 for rank in ranks)
    of_all = replace(
        found,
        used_bytes={**found.used_bytes, host: used},
        capacity_bytes={**found.capacity_bytes, host: capacity or None},
    )
    return status.model_copy(update={"statistics": of_all})


def view_of_facts(run: str, facts: RunFacts, snapshot: RunSnapshot) -> RunView:
    """Return the frame of a listing of the tiers, where no trainer is alive."""
    unread = (with_tier(tier, error) for tier, error in facts.unread.items())
    damaged = (
        with_tier(x.tier, error)
        for x in facts.listings
        for error in (*x.damaged, *(copy.unread for copy in x.copies))
        if error is not None
    )
    return RunView(
        snapshot=snapshot,
        status=RunStatus(
            run=run,
            tiers={tier.name: tier.kind for tier in facts.safety.tiers},
            checkpoints=tuple(facts.checkpoints.values()),
            checkpoints_known=len(facts.checkpoints),
            statistics=facts.statistics,
        ),
        unread=tuple(facts.unread),
        problems=(*snapshot.problems, *unread, *damaged),
    )


# For programs ----------------------------------------------------------------------------------------


def _slot_members(snapshot: RunSnapshot, slot: RankProcess) -> dict[str, Any]:
    status = slot.status
    return {
        "slot": slot.number,
        "alive": slot.alive,
        "owner": owner_members(slot.owner),
        **members(status, "rank", "world_size", "attempt", "pid", "node"),
        "age_s": snapshot.age_s(status) if status else None,
        **members(status, "failure"),
        **members(status and status.statistics, "lost_events"),
        "transfers": [t.model_dump(mode="json") for t in status.transfers] if status else [],
    }


# For people ------------------------------------------------------------------------------------------


def _heading(frame: RunView) -> Iterator[Part]:
    snapshot = frame.snapshot
    if (live := snapshot.live) is not None:
        yield (
            f"run {live.run}: trained by process {live.pid} on {live.node}, rank {live.rank} of "
            f"{live.world_size}, attempt {live.attempt}"
        )
        if live.failure:
            yield Text(f"it has stopped flushing: {live.failure}", style="red")
        elif (age_s := snapshot.age_s(live)) > HANGS_AFTER_S:
            yield Text(f"its status is {format_duration(age_s)} old: it may hang", style="yellow")
        return
    if snapshot.owner is not None:
        yield f"run {frame.status.run}: a process owns it, and has written no status yet: {snapshot.owner}"
    else:
        yield f"run {frame.status.run}: no trainer is alive on this machine; this is what the tiers hold"
    if (last := snapshot.last_status) is not None:
        yield f"process {last.pid} has ended; its last status, {_ago(snapshot, last)}:"
        for transfer in last.transfers:
            share = format_share(transfer.done_bytes / max(1, transfer.bytes))
            yield f"  {transfer.step}@{transfer.attempt} was being copied to {transfer.tier}: {share}"
        if not last.transfers:
            yield "  nothing was being copied"


def _ago(snapshot: RunSnapshot, status: Status) -> str:
    return f"{format_duration(round(snapshot.age_s(status)))} ago"


def _bar(share: float | None, style: str = "cyan") -> ProgressBar | str:
    bar = ProgressBar(1.0, share or 0.0, complete_style=style, finished_style=style)
    return "" if share is None else bar


def _table_with_bars(*columns: str, right: Sequence[str], bars: bool) -> Table:
    """Return a table whose last column, of bars if there are any, is what a narrow terminal takes away from."""
    made = table(*columns, *([BAR] if bars else []), right=right)
    for column in made.columns:
        column.no_wrap = True
    if bars:
        made.columns[-1].no_wrap, made.columns[-1].overflow = False, "crop"
        made.columns[-1].max_width = BAR_WIDTH
    return made


def _tier_table(status: RunStatus, bars: bool) -> Table:
    """Return the table of tiers: a column for each figure that has a heading."""
    shown = [figure for figure in FIGURES.values() if figure.column]
    right = [figure.column for figure in shown]
    made = _table_with_bars("TIER", "KIND", *right, right=right, bars=bars)
    for tier, kind in status.tiers.items():
        found = of_tier(status.statistics, tier)
        cells = [cell(found.get(each.name), partial(format_figure, each)) for each in shown]
        style = "red" if found.get("failing") else "cyan"
        bar = [_bar(found.get("fill"), style)] if bars else []
        made.add_row(tier, str(kind), *cells, *bar)
    return made


def _grid(frame: RunView, rows: int) -> Table | Text:
    shown = [*reversed(frame.status.checkpoints[-rows:])]
    metrics = frame.metrics
    if metrics is None:
        metrics = sorted({name for one in shown for name in one.metrics})
    return checkpoints_table(
        shown,
        [*frame.status.tiers],
        metrics,
        now_s=frame.snapshot.wall_time_s,
        unread=frame.unread,
    )


def _transfer_table(transfers: tuple[TransferStatus, ...], bars: bool) -> Table:
    right = ("DONE", "SIZE", "RATE", "LEFT")
    made = _table_with_bars("COPY", "TO", "PHASE", *right, right=right, bars=bars)
    for one in transfers:
        share = one.done_bytes / max(1, one.bytes)
        made.add_row(
            f"{one.step}@{one.attempt}",
            one.tier,
            one.phase,
            format_share(round(share, 2)),
            format_size(one.bytes),
            cell(one.bytes_per_s or None, format_rate),
            cell(one.left_s, format_duration),
            *([_bar(share)] if bars else []),
        )
    return made


def _slot_table(snapshot: RunSnapshot) -> Table:
    right = ("SLOT", "RANK", "PROCESS", "SEEN")
    made = table(*right, "IN MEMORY", "COPIES", right=right)
    for slot in snapshot.slots:
        status = slot.status
        if status is None:
            process = "-" if slot.owner is None else str(slot.owner.pid)
            made.add_row(str(slot.number), "-", process, "-", "-", "-")
            continue
        made.add_row(
            str(slot.number),
            str(status.rank),
            str(status.pid) if slot.alive else f"{status.pid} (gone)",
            _ago(snapshot, status),
            format_size(status.statistics.used_bytes.get(next(iter(status.tiers)), 0)),
            ", ".join(f"{t.step}@{t.attempt} to {t.tier}" for t in status.transfers) or "-",
        )
    return made


def _format_event(event: dict[str, Any]) -> str:
    """Format an event as one line: time, kind, step, tier and its other members."""
    at = _readable_number(event.get("wall_time_s"))
    when = (
        "-" if at is None or abs(at) > TIME_MAX_S else time.strftime("%H:%M:%S", time.localtime(at))
    )
    parts = [when, str(event["kind"]).replace("_", " ")]
    if "step" in event:
        parts.append(f"{event['step']}@{event.get('attempt')}")
    if "tier" in event:
        parts.append(str(event["tier"]))
    for name in _SHOWN_MEMBERS:
        value = event.get(name)
        number = _readable_number(value)
        if name == "bytes" and number is not None:
            parts.append(format_size(number))
        elif name == "seconds" and number is not None:
            parts.append(f"in {format_duration(number)}")
        elif isinstance(value, str | int):
            parts.append(str(value))
    return " ".join(parts)


def _readable_number(value: object) -> float | None:
    """Return a number from an untrusted file; None where it is no number, or too large for a time or a size."""
    if isinstance(value, int | float) and abs(value) < NUMBER_MAX:
        return float(value)
    return None


def watch(
    asked: Asked, every_s: float, once: bool, prometheus: tuple[str, int] | None, metrics: bool
) -> None:
    """Show a run live, or one frame of it, or serve its metrics."""
    settings = load_settings(asked)
    if once and prometheus is not None:
        refuse(
            "--once and --prometheus: one ends at once, the other goes on; expected one", Exit.USAGE
        )
    watcher = Watcher(settings, run=settings.run)
    if prometheus is not None:
        _serve(watcher, *prometheus, settings.run, as_json=asked.as_json)
        return
    names = None if metrics else used_metrics(tier_rules(settings))
    frames = (replace(frame, metrics=names) for frame in _frames(settings, watcher))
    if once:
        _once(next(frames), as_json=asked.as_json)
        return
    try:
        with _screen(as_json=asked.as_json) as show:
            for frame in frames:
                show(frame)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return  # Ctrl-C is how a person ends it


def _serve(watcher: Watcher, address: str, port: int, run: str, *, as_json: bool) -> None:
    """Serve metrics until Ctrl-C, or until a signal ends the process."""
    server = MetricsServer(address, port, watcher.living_statuses, run=run, where="--prometheus")
    answer = CommandOutput(as_json, document={"run": run, "address": address, "port": port})
    answer.show(f"run {run}: /metrics and /healthz are served on port {port}; Ctrl-C ends it")
    answer.finish()
    try:
        while True:
            time.sleep(LIST_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        server.close()


def _frames(settings: Config, watcher: Watcher) -> Iterator[RunView]:
    """Give a view per frame: by the status of a living trainer, else by a listing of the tiers every
    ``LIST_EVERY_S``."""
    facts: RunFacts | None = None
    while True:
        snapshot = watcher.take_snapshot()
        if (live := snapshot.live) is not None:
            facts = None
            yield view_of_status(live, snapshot)
            continue
        if facts is None or snapshot.wall_time_s >= facts.wall_time_s + LIST_EVERY_S:
            with RunReader(settings) as reader:
                facts = RunFacts(reader)
        yield view_of_facts(settings.run, facts, snapshot)


def _once(frame: RunView, *, as_json: bool) -> None:
    answer = CommandOutput(as_json, document=frame.document)
    for problem in frame.problems:
        answer.problem(problem)
    answer.show(*frame.shown())
    answer.finish()


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[RunView], None]]:
    """Give what prints a frame: as a line of JSON, on the whole screen of a terminal, or below the last one in a file
    or pipe."""
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        yield lambda frame: typer.echo(to_document(frame.document, frame.problems))
    elif not sys.stdout.isatty() or console.is_dumb_terminal:
        yield _print_below
    else:
        live = Live(console=console, auto_refresh=False, screen=True)
        with _giving_back(live) as draw, live:
            yield lambda frame: draw(_fitted(frame, console))


@contextmanager
def _giving_back(live: Live) -> Iterator[Callable[[RenderableType], None]]:
    """Give the screen back before SIGTERM ends the process, and while Ctrl-Z stops it. Yield what draws a frame: a
    Ctrl-Z that comes while one is written waits for its end."""
    is_writing = is_asked = False

    def stop() -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        live.start(refresh=True)

    def write(act: Callable[[], None]) -> None:
        nonlocal is_writing, is_asked
        is_writing = True
        try:
            act()
            while is_asked:
                is_asked = False
                stop()
        finally:
            is_writing = False

    def on_stop(number: int, _: object) -> None:
        nonlocal is_asked
        is_asked = True
        if not is_writing:
            write(lambda: None)

    handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, on_stop),
    }
    try:
        yield lambda frame: write(lambda: live.update(frame, refresh=True))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _print_below(frame: RunView) -> None:
    answer = CommandOutput(as_json=False)
    answer.show(*frame.shown(), *(f"tierfall: {problem}" for problem in frame.problems), "")
    answer.finish()


def _fitted(frame: RunView, console: Console) -> RenderableType:
    """Draw a frame with as many steps as the screen has lines for."""
    drawn = _drawn(frame, ROWS_ON_SCREEN)
    over = len(console.render_lines(drawn)) - console.height
    return drawn if over <= 0 else _drawn(frame, max(1, frame.rows(ROWS_ON_SCREEN) - over))


def _drawn(frame: RunView, rows: int) -> RenderableType:
    problems = (Text(f"tierfall: {problem}", style="red") for problem in frame.problems)
    parts = (*problems, *frame.shown(rows, bars=True))
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))
