"""``watch``: a live view of tiers, copies, transfers and events: by the trainer's status, or by a listing of the
tiers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
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
from tierfall.cli.usage import Asked, Exit, print_out, refuse, to_document
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
_SHOWN_MEMBERS = ("tier", "bytes", "seconds", "outcome", "reason", "doing", "count")

ROWS_ON_SCREEN = 200
HOME, CLEAR = "\x1b[H", "\x1b[H\x1b[2J"
TO_THE_END_OF_LINE, TO_THE_END = "\x1b[K", "\x1b[J"


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

    def shown(self, rows_max: int = ROWS_MAX) -> Iterator[Part]:
        """Give the lines and tables of a frame, the newest step first."""
        yield from _heading(self)
        yield ""
        seen = self.status
        yield _tier_table(seen)
        for tier, reason in seen.statistics.failing.items():
            if reason:
                yield Text(with_tier(tier, reason), style="red")
        if seen.transfers:
            yield ""
            yield _transfer_table(seen.transfers)
        rows = min(rows_max, len(seen.checkpoints))
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


def _tier_table(status: RunStatus) -> Table:
    """Return the table of tiers: a column for each figure that has a heading."""
    shown = [figure for figure in FIGURES.values() if figure.column]
    right = [figure.column for figure in shown]
    made = table("TIER", "KIND", *right, right=right)
    for tier, kind in status.tiers.items():
        found = of_tier(status.statistics, tier)
        cells = [cell(found.get(each.name), partial(format_figure, each)) for each in shown]
        made.add_row(tier, str(kind), *cells, style="red" if found.get("failing") else None)
    return made


def _grid(frame: RunView, rows: int) -> Text:
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


def _transfer_table(transfers: Iterable[TransferStatus]) -> Table:
    right = ("DONE", "SIZE", "RATE", "LEFT")
    made = table("COPY", "TO", "PHASE", *right, right=right)
    for one in transfers:
        made.add_row(
            f"{one.step}@{one.attempt}",
            one.tier,
            one.phase,
            format_share(round(one.done_bytes / max(1, one.bytes), 2)),
            format_size(one.bytes),
            cell(one.bytes_per_s or None, format_rate),
            cell(one.left_s, format_duration),
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


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "wall_time_s": lambda at: time.strftime("%H:%M:%S", time.localtime(at)),
    "bytes": format_size,
    "seconds": lambda seconds: f"in {format_duration(seconds)}",
}


def _format_event(event: dict[str, Any]) -> str:
    """Format an event as one line: time, kind, step, tier and its other members."""

    def told(name: str) -> str:
        value = event.get(name, "")
        try:
            return _FORMATS.get(name, str)(value)
        except (TypeError, ValueError, OverflowError, OSError):  # an event log is not to be trusted
            return str(value)

    parts = [told("wall_time_s") or "-", str(event["kind"]).replace("_", " ")]
    if "step" in event:
        parts.append(f"{event['step']}@{event.get('attempt')}")
    return " ".join([*parts, *filter(None, map(told, _SHOWN_MEMBERS))])


def watch(
    asked: Asked, every: float, once: bool, prometheus: tuple[str, int] | None, metrics: bool
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
        paint = _painter(as_json=asked.as_json)
        for frame in frames:
            paint(frame)
            time.sleep(every)
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


def _painter(*, as_json: bool) -> Callable[[RunView], None]:
    """Return what prints a frame: as a line of JSON, over the last one on a terminal, or below it in a file or pipe."""
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        return lambda frame: print_out(to_document(frame.document, frame.problems) + "\n")
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return _print_below
    print_out(CLEAR)
    return partial(_paint, console)


def _print_below(frame: RunView) -> None:
    answer = CommandOutput(as_json=False)
    answer.show(*frame.shown(), *(f"tierfall: {problem}" for problem in frame.problems), "")
    answer.finish()


def _paint(console: Console, frame: RunView) -> None:
    """Print a frame from the top of the screen, with as many steps as the screen has lines for."""
    lines = _drawn(console, frame, ROWS_ON_SCREEN)
    if (over := len(lines) - (console.height - 1)) > 0:
        rows = min(ROWS_ON_SCREEN, len(frame.status.checkpoints))
        lines = _drawn(console, frame, max(1, rows - over))
    shown = (f"{line}{TO_THE_END_OF_LINE}\n" for line in lines[: console.height - 1])
    print_out("".join([HOME, *shown, TO_THE_END]))


def _drawn(console: Console, frame: RunView, rows: int) -> list[str]:
    with console.capture() as drawn:
        for problem in frame.problems:
            console.print(f"tierfall: {problem}", style="red")
        for part in frame.shown(rows):
            console.print(part)
    return drawn.get().splitlines()
