"""What the commands on a run share: their progress; the configuration; ``RunFacts``, one listing of all its tiers."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from rich.text import Text

from tierfall.cli.output import (
    CommandOutput,
    aligned,
    as_state,
    cell,
    screen_width,
    styled,
    with_tier,
)
from tierfall.cli.usage import (
    DEFAULT_CONFIG,
    Asked,
    Exit,
    StepName,
    print_problem,
    refuse,
)
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address
from tierfall.core.format.catalog import KnownCheckpoint, merge, to_view
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.text import format_some, hint_at, members
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CheckpointId, CopyState, TierKind
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.ops.commands import (
    restorable,
    unread,
    view_of,
    without_good_copy,
)
from tierfall.ops.reader import RunReader, Watcher, config_of_place, find_owner_of, find_runs
from tierfall.policies.forecast import loss_bounds, peer_survival
from tierfall.policies.retention import plan_retention
from tierfall.setup.places import run_folder, seen_by_one
from tierfall.setup.start import newest_attempt
from tierfall.setup.tiers import tier_rules
from tierfall.telemetry.figures import Statistics
from tierfall.telemetry.progress import LINE_EVERY_S, Watch, shown
from tierfall.telemetry.reports import CheckpointInfo, CopyInfo, format_unread
from tierfall.telemetry.status import Status

REMARKS = "REMARKS"


def of_this_user(settings: Config) -> str:
    """Return whose host memory a command has seen, to append to its name: the default folder is that of one user."""
    return "" if settings.host.folder else " of this user"


def document_of(run: str, of_steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of one step as it is; those of several as ``steps``."""
    return of_steps[0] if len(of_steps) == 1 else {"run": run, "steps": list(of_steps)}


def checkpoints_table(
    shown: Sequence[CheckpointInfo],
    tiers: Sequence[str],
    metrics: Sequence[str],
    *,
    now_s: float,
    unread: Collection[str] = (),
) -> Text:
    """Return a table of checkpoints with a column for the state on each tier, for each metric and for remarks; with one
    column for all tiers if it would be wider than the terminal. ``unread`` are tiers that could not be read."""
    narrow_head, wide_head = ("STEP", "AGE", "SIZE", "COPIES"), ("STEP", "AGE", "SIZE", *tiers)
    wide, narrow = [], []
    for one in shown:
        age = cell(one.wall_time_s, lambda at: rough_duration(max(0.0, now_s - at)))
        head = (f"{one.step}@{one.attempt}", age, format_size(one.bytes))
        states = {tier: as_state("?" if tier in unread else one.on(tier)) for tier in tiers}
        values = {name: format_metric(one.metrics.get(name)) for name in metrics}
        remarks = ", ".join(one.remarks)
        wide.append((*head, *states.values(), *values.values(), remarks))
        copies = [
            tier if found == CopyState.COMMITTED else f"{tier} {found}"
            for tier, found in states.items()
            if found != "-"
        ]
        told = [*(f"{name} {value}" for name, value in values.items() if value), remarks]
        narrow.append((*head, ", ".join(copies), ", ".join(filter(None, told))))
    right = {"STEP", "AGE", "SIZE", *metrics}
    drawn = aligned((*wide_head, *metrics, REMARKS), wide, right)
    if max(map(len, drawn)) > screen_width():
        drawn = aligned((*narrow_head, REMARKS), narrow, right)
    return styled(drawn)


def format_metric(value: float | str | None) -> str:
    """Format a metric with four digits; nothing if a checkpoint lacks it."""
    return "" if value is None else f"{float(f'{float(value):.4g}'):g}"


def rough_duration(seconds: float) -> str:
    """Format a time in its largest unit: ``5 h``."""
    return " ".join(format_duration(round(seconds)).split()[:2])


def describe_new(tier: str, place: str) -> str:
    """Format a tier whose folder no run has used."""
    return f"{tier}: {place} is not created yet: the first training creates it"


def showing(what: str, settings: Config) -> AbstractContextManager[Watch]:
    """Show the progress of a command; give what moves it, from any thread."""

    def say(line: str) -> None:
        if not sys.stderr.isatty():  # else it is drawn there
            print_problem(line)

    folder = partial(run_folder, settings, settings.run)
    return shown(what, folder, say, first_s=LINE_EVERY_S)


# What is read of a run ------------------------------------------------------------------------------

logger = logging.getLogger("tierfall")


def load_settings(asked: Asked, *, doing: str = "") -> Config:
    """Read the configuration as this node sees it; ends the command if it is invalid. A command that does more than
    read says so by its name, ``doing``: it needs a file."""
    return seen_by_one(load_settings_of_all(asked, doing=doing))


def load_settings_if_any(asked: Asked, *, doing: str = "") -> Config | None:
    """Read the configuration as ``load_settings`` does; None if none is named, and there is no ``./tiers.yaml``."""
    if asked.config is None and not Path(DEFAULT_CONFIG).exists():
        return None
    return load_settings(asked, doing=doing)


def load_settings_of_all(asked: Asked, *, doing: str = "") -> Config:
    """Read the configuration as a job on several nodes sees it, with their memory."""
    if asked.config is None and not Path(DEFAULT_CONFIG).exists():
        refuse(
            f"no configuration: there is no {DEFAULT_CONFIG} here; name a YAML file by --config, or set "
            "TIERFALL_CONFIG; 'tierfall init' writes one",
            Exit.USAGE,
        )
    source = asked.config or DEFAULT_CONFIG
    is_place = is_address(source) or Path(source).expanduser().is_dir()
    if is_place and doing:
        refuse(
            f"{doing}: a folder or an address is only read; name the YAML file of the run by --config",
            Exit.USAGE,
        )
    return config_of_place(source, asked.run) if is_place else load_config(source, run=asked.run)


def name_other_runs(settings: Config) -> str:
    """Name the tiers that could not be read, and the runs of the others, after a run that has no checkpoint."""
    found, unread = find_runs(settings)
    names = [name for name in found if name != settings.run]
    others = f"; the tiers have the runs {format_some(names)}" if names else ""
    return format_unread(unread) + others


def check_tier(settings: Config, tier: str | None) -> None:
    """End the command where no tier has that name."""
    known = [t.name for t in settings.chain]
    if tier is not None and tier not in known:
        hint = hint_at(tier, known)
        refuse(f"no tier is named {tier!r}; there are {', '.join(known)}{hint}", Exit.USAGE)


def check_ownerless(settings: Config, doing: str, why: str) -> None:
    """End a command that must not run beside a trainer, if one owns the run on this machine."""
    if (owner := find_owner_of(settings)) is not None:
        refuse(f"{doing}: a trainer owns run {settings.run!r} ({owner}){why}")


def owner_members(owner: LockOwner | None) -> dict[str, Any] | None:
    return None if owner is None else members(owner, "pid", "node", "since_wall_s")


class RunFacts:
    """One listing of all tiers of a run, at ``wall_time_s``. Tiers that are ``not_created`` yet are empty. ``owner`` is
    the living trainer on this machine, ``newest_attempt`` the record of the newest start; None: not known."""

    def __init__(self, reader: RunReader) -> None:
        self.run, self.config = reader.run, reader.config
        self.listings, self.not_created = reader.list_with_new()
        try:
            found = newest_attempt(self.listings, reader.stores)
        except TierfallError as error:
            logger.debug("the record of the newest attempt could not be read: %s", error)
            found = None
        self.newest_attempt = found and found[0]
        self.owner = reader.owner()
        self.wall_time_s = time.time()
        self.known = merge(self.listings)
        self.by_id = {c.id: c for c in self.known}
        self.unread = unread(self.listings)

    @classmethod
    def read(cls, settings: Config) -> Self:
        with RunReader(settings) as reader:
            return cls(reader)

    @cached_property
    def newest(self) -> CheckpointId | None:
        """The newest checkpoint that can be restored."""
        return next(iter(restorable(self.known)), None)

    @cached_property
    def view(self) -> View:
        """What the policies decide on."""
        return view_of(self.config, self.known)

    @cached_property
    def safety(self) -> View:
        """``view`` with the read-only tiers, whose copies survive losses, too."""
        rules = tier_rules(self.config, read_too=True)
        return to_view(rules, self.known, wall_time_s=self.wall_time_s)

    @cached_property
    def statistics(self) -> Statistics:
        """The figures that a listing gives. ``peer_survival`` is of the time at which the newest checkpoint in peer
        memory was committed; None if this node has nothing there that it saved. ``run_ettr`` is as of the newest
        checkpoint."""
        start, safety = self.newest_attempt, self.safety
        last = self.by_id[self.newest].commit if self.newest else None
        survival = None
        if self.config.peers is not None and start is not None and start.node_losses is not None:
            survival = peer_survival(safety, start.number, start.node_losses)
        return Statistics(
            checkpoints={listing.tier: len(listing.copies) for listing in self.listings},
            used_bytes={listing.tier: listing.used_bytes for listing in self.listings},
            capacity_bytes={tier.name: tier.capacity_bytes for tier in safety.tiers},
            loss_bound=loss_bounds(safety),
            peer_survival=survival,
            run_ettr=last.progress.ettr(last.wall_time_s) if last and last.progress else None,
        )

    @cached_property
    def trainer(self) -> Status | None:
        """The status of the living trainer on this machine; None: there is none, or it could not be read."""
        return Watcher(self.config, run=self.run).take_snapshot().live if self.owner else None

    @cached_property
    def _seen(self) -> dict[CheckpointId, CheckpointInfo]:
        """The newest checkpoints as the trainer sees them, oldest first."""
        known = self.trainer.checkpoints if self.trainer else ()
        return {CheckpointId(one.step, one.attempt): one for one in known}

    @cached_property
    def checkpoints(self) -> dict[CheckpointId, CheckpointInfo]:
        """Every checkpoint, and every unfinished one, oldest first."""
        unfinished = {id for listing in self.listings for id in listing.unfinished}
        owed = {c.id: c.owed - self.unread.keys() for c in self.view.checkpoints}
        return {
            id: self._info(id, owed.get(id, frozenset()))
            for id in sorted({*self.by_id, *unfinished})
        }

    def _incomplete(self, id: CheckpointId, tier: str) -> str:
        """Return the state of a copy without its commit record, which is written last and deleted first."""
        seen, oldest = self._seen.get(id), next(iter(self._seen), id)
        is_leaving = id < oldest if seen is None else tier in seen.copies
        state = CopyState.LEAVING if is_leaving else CopyState.ARRIVING
        return str(state) if self.owner else "unfinished"

    def _info(self, id: CheckpointId, owed: frozenset[str]) -> CheckpointInfo:
        begun = {
            each.tier: CopyInfo(state=self._incomplete(id, each.tier), bytes=each.unfinished[id])
            for each in self.listings
            if id in each.unfinished
        }
        known, seen = self.by_id.get(id), self._seen.get(id)
        told = seen.copies.items() if seen else ()  # what moves, the trainer says itself
        aside = seen.set_aside if seen else {}
        begun |= {tier: copy for tier, copy in told if copy.state == CopyState.ARRIVING}
        if known is None:
            most = max(copy.bytes for copy in begun.values())
            return CheckpointInfo(step=id.step, attempt=id.attempt, bytes=most, copies=begun)
        held = {
            tier: CopyInfo(
                state=copy.label,
                bytes=copy.bytes,
                damage=None if copy.damage is None else str(copy.damage),
            )
            for tier, copy in known.copies.items()
        }
        held |= {t: copy for t, copy in told if t in held and copy.state == CopyState.LEAVING}
        line = known.commit.lineage if known.commit else None
        return CheckpointInfo(
            step=id.step,
            attempt=id.attempt,
            ordinal=line.ordinal if line else None,
            started_from=line.started_from if line else None,
            bytes=known.bytes,
            wall_time_s=known.wall_time_s,
            pinned=known.pinned,
            abandoned=known.abandoned,
            deleted=known.deleted,
            tags=tuple(sorted(known.tags)),
            metrics=known.metrics,
            not_finite=tuple(sorted(known.not_finite)),
            copies=begun | held,
            owed=tuple(tier.name for tier in self.view.tiers if tier.name in owed - aside.keys()),
            set_aside=aside,
        )

    def decision(self, tier: str, id: CheckpointId) -> Decision:
        """Return what retention decides about a copy, with the reason."""
        rules = next((rules for rules in self.view.tiers if rules.name == tier), None)
        if rules is None:
            reason = "the tier is read-only: nothing is deleted there"
        elif rules.kind is TierKind.HOST:
            newest = max((c.id for c in self.view.on(tier) if c.live), default=None)
            reason = "until a save needs its room; the oldest is evicted first"
            if newest == id:
                reason = "the newest in memory is always kept"
        elif decided := [d for d in plan_retention(self.view, tier) if d.checkpoint == id]:
            return decided[0]
        else:
            reason = f"no rule deletes it: {self.by_id[id].copies[tier].damage}"
        return Decision(checkpoint=id, tier=tier, verdict=Verdict.KEEP, reason=reason, bytes=0)

    # What ends a command, or is told beside its answer -----------------------------------------------

    @property
    def problems(self) -> Iterator[str]:
        """What is damaged, and what could not be read."""
        for listing in self.listings:
            tier = listing.tier
            if listing.error is not None:
                yield with_tier(tier, listing.error, " could not be read")
            yield from (with_tier(tier, x, " holds a damaged file") for x in listing.damaged)
            for copy in listing.copies:
                if copy.damage is not None:
                    what = "could not be read" if copy.unread else "is damaged"
                    why = str(copy.damage).removeprefix(f"{tier}: ")
                    why = why.removeprefix(f"{copy.id} was found damaged: ")  # by the tier's list
                    yield f"{copy.id} {what} on tier {tier}: {why}"

    def note_newer(self, answer: CommandOutput, newest: CheckpointId | None) -> None:
        """Report the checkpoints after ``newest``, which can be restored, of which no tier has a good copy."""
        for id, why in sorted(without_good_copy(self.known).items()):
            if newest is None or id > newest:
                answer.problem(f"{id} is newer, and {why}")

    def warn_if_elsewhere(self) -> None:
        """Warn if the newest attempt is of another node: whether its trainer is alive cannot be known here."""
        start = self.newest_attempt
        if start is not None and start.node != socket.gethostname():
            print_problem(
                f"the newest attempt, {start.number}, was started on {start.node}; whether its trainer is alive cannot "
                "be seen from this machine"
            )

    def find(
        self, answer: CommandOutput, name: StepName, tier: str | None = None, *, doing: str
    ) -> KnownCheckpoint:
        """Find the checkpoint that STEP names, on ``tier`` if one is given: without an attempt, that of the live
        lineage. If it is not there, or an unread tier may hold a later ``latest``, end the command, and name the tiers
        that could not be read."""
        known = [c for c in self.known if tier is None or tier in c.copies]
        silent = {name: error for name, error in self.unread.items() if tier in (None, name)}
        lost, newest = ", ".join(silent), None
        if name.step is None:
            newest = next(iter(restorable(known)), None)
            fitting = [c for c in known if c.id == newest and not silent]
            problem = "the run has no step that can be restored"
            if silent:
                seen = f"; of the others it is {newest}" if newest else ""
                problem = f"{lost} may hold a later step than the others{seen}: name it"
        else:
            of_step = [c for c in known if c.id.step == name.step]
            fitting = [
                c
                for c in of_step
                if c.id.attempt == name.attempt or (name.attempt is None and not c.abandoned)
            ]
            which = f"step {name.step}"
            which += "" if name.attempt is None else f" of attempt {name.attempt}"
            where, are = "is not there", "steps are"
            if silent:
                where = f"is on none of the tiers that could be read, and may be on {lost}"
                are = "that could be seen are"
            there = ", ".join(f"{c.id}{' (abandoned)' if c.abandoned else ''}" for c in of_step)
            last = ", ".join(str(c.id) for c in known[-8:])
            seen = f"the newest {are} {last}" if known else "there is no other"
            if of_step:
                seen = f"there is {there}: name it with its attempt"
            problem = f"{which} {where}; {seen}"
        if not fitting:
            answer.note_unread(silent)
            answer.refuse(f"{doing}: {problem}")
        if name.step is None:
            self.note_newer(answer, newest)
        return fitting[-1]
