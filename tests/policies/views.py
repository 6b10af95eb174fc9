"""Views as text: how golden files say what lies where, what is asked, and what is answered.

    ## title of the case
    now SECONDS
    tier NAME KIND [shared] [last=N] [every=N] [within=SECONDS] [capacity=N high=SHARE [low=SHARE]] [order=NAME]
        [newest_first | scattered] [when_full=WORD]
    retain TIER RULE=VALUE ...          as in YAML: every=1000 every=1d best=loss:min:2 for=30d tags=true tags=a,b
    many-ranks
    read TIER=BYTES-PER-SECOND ...      how fast tiers were seen to be read
    failing NAME ...
    restored STEP@ATTEMPT [attempt=N]
    restoring
    have STEP@ATTEMPT [ordinal=N] [from=STEP@ATTEMPT] [pinned] [deleted] [abandoned] [settling] [owed=TIER,TIER]
        [damaged=TIER,TIER] [saved=SECONDS] [tags=A,B] [METRIC:VALUE] [size=BYTES]
        TIER=STATE[:leased] | TIER=arriving:BYTES that have come ...
    ask retention TIER | flush TIER | eviction TIER need=N free=N | superseding TIER need=N free=N
        | relief TIER missing=N | guard TIER STEP@ATTEMPT | due TIER | owed ORDINAL | still-owed STEP@ATTEMPT
        | metrics saves=N | in-time STEP@ATTEMPT | late TIER behind=SECONDS | save STEP every=N
        | yield share=SHARE least=SHARE idle=SECONDS,... busy=SECONDS,...
        | forecast TIER saves=N every=SECONDS bytes=N rate=N stretches=N waiting=N
    ask drain SECONDS TIER=BYTES-PER-SECOND ...
    ask loss STEP [seconds=OF-A-STEP]
    -> an answer, one line each, with its reason

Every copy has 100 bytes, or what its checkpoint's ``size`` says. Times are in seconds on the wall. A host tier
supersedes, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tests.rules import NEWEST_FIRST, SCATTERED, order, retained
from tierfall.config import RetainSection
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import (
    CheckpointId,
    CopyState,
    LossClass,
    TierKind,
    WhenFull,
    survives,
)
from tierfall.core.types.view import (
    CheckpointView,
    CopyView,
    DrainDecision,
    LossBound,
    TierRules,
    View,
)
from tierfall.policies.backpressure import Fits, plan_relief, plan_superseding
from tierfall.policies.cadence import should_save
from tierfall.policies.drain import describe_drain, plan_drain
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import lateness, owed_in_time, plan_flush, still_owed, tiers_owed
from tierfall.policies.forecast import forecast, loss_bounds
from tierfall.policies.protection import reason_to_keep
from tierfall.policies.retention import missing_metrics, next_due_s, plan_retention
from tierfall.policies.throttle import plan_yield

COPY_BYTES = 100
FLUSH_ORDERS = {rule.policy.name: rule for rule in (NEWEST_FIRST, SCATTERED)}


@dataclass
class Picture:
    """A view that grows line by line."""

    tiers: list[TierRules] = field(default_factory=list)
    checkpoints: list[CheckpointView] = field(default_factory=list)
    failing: frozenset[str] = frozenset()
    restored_from: CheckpointId | None = None
    attempt: int | None = None
    restoring: bool = False
    now_s: float = 0.0
    many_ranks: bool = False
    read_bytes_per_s: dict[str, float] = field(default_factory=dict)

    def view(self) -> View:
        return View(
            tiers=tuple(self.tiers),
            checkpoints=tuple(sorted(self.checkpoints, key=lambda c: c.id)),
            failing=self.failing,
            restored_from=self.restored_from,
            attempt=self.attempt,
            restoring=self.restoring,
            wall_time_s=self.now_s,
            many_ranks=self.many_ranks,
            read_bytes_per_s=self.read_bytes_per_s,
        )

    def checkpoint(self, id: CheckpointId) -> CheckpointView:
        return next(c for c in self.checkpoints if c.id == id)


def answered(text: str) -> str:
    """Return a golden file as it would be if its answers were today's."""
    return "\n".join(_lines(text)) + "\n"


def _lines(text: str) -> Iterator[str]:
    picture = Picture()
    for line in text.splitlines():
        if line.startswith("->"):
            continue
        yield line
        words = line.split()
        if line.startswith("## "):
            picture = Picture()
        elif words and not line.startswith("#"):
            for answer in _take(picture, words[0], words[1:]):
                yield f"-> {answer}"


def _take(picture: Picture, verb: str, words: list[str]) -> list[str]:
    match verb:
        case "tier":
            picture.tiers.append(_tier(words))
        case "now":
            picture.now_s = float(words[0])
        case "many-ranks" | "restoring":
            setattr(picture, verb.replace("-", "_"), True)
        case "read":
            picture.read_bytes_per_s = _rates(words)
        case "retain":
            place = next(i for i, tier in enumerate(picture.tiers) if tier.name == words[0])
            more = _retain(words[1:])
            tier = picture.tiers[place]
            picture.tiers[place] = replace(tier, retain=(*tier.retain, *more))
        case "have":
            picture.checkpoints.append(_checkpoint(words))
        case "failing":
            picture.failing = frozenset(words)
        case "restored":
            picture.restored_from = _id(words[0])
            picture.attempt = int(_options(words[1:]).get("attempt", 0)) or None
        case "ask":
            return _ask(picture, words[0], words[1:]) or ["nothing"]
        case _:
            raise ValueError(f"no such line: {verb}")
    return []


def by_bytes(view: View, tier_name: str, need: int, *, free: int) -> Fits:
    """Count bytes: what is gone leaves no gap that is too small."""
    held = {c.id: c.copies[tier_name].bytes for c in view.checkpoints if tier_name in c.copies}
    return lambda gone: free + sum(held[id] for id in gone) >= need


def _ask(picture: Picture, what: str, words: list[str]) -> list[str]:
    view, options = picture.view(), _options(words)
    match what:
        case "retention" | "flush" | "eviction" | "superseding" | "relief" | "due":
            return _plan(view, what, words[0], options)
        case "yield":
            return _yield(options)
        case "forecast":
            return _forecast(view.tier(words[0]), options)
        case "late":
            return [lateness(view.tier(words[0]), float(options["behind"])) or "in time"]
        case "in-time":
            return [owed_in_time(view, picture.checkpoint(_id(words[0]))) or "no bound"]
        case "guard":
            tier, checkpoint = view.tier(words[0]), picture.checkpoint(_id(words[1]))
            return [reason_to_keep(view, checkpoint, tier, frozenset()) or "may go"]
        case "owed":
            return list(tiers_owed(view.tiers, int(words[0])))
        case "still-owed":
            return list(still_owed(view, picture.checkpoint(_id(words[0]))))
        case "save":
            every = int(options["every"])
            return ["yes" if should_save(int(words[0]), every_steps=every) else "no"]
    return _ask_of_all(view, what, words, options)


def _ask_of_all(view: View, what: str, words: list[str], options: dict[str, str]) -> list[str]:
    match what:
        case "metrics":
            return list(missing_metrics(view, saves_min=int(options["saves"])).values())
        case "loss":
            bounds = loss_bounds(
                view,
                step=int(words[0]),
                step_s=float(options["seconds"]) if "seconds" in options else None,
            )
            return [_bound(lost, bound) for lost, bound in bounds.items()]
        case "drain":
            decisions = plan_drain(
                view,
                bytes_per_s=_rates(words),
                left_s=float(words[0]),
            )
            return [*(_drained(d) for d in decisions), *describe_drain(decisions)]
    raise ValueError(f"no such question: {what}")


def _bound(lost: LossClass, bound: LossBound) -> str:
    if bound.survives is None:
        return f"{lost}: nothing survives"
    known = [f"{bound.steps_lost} steps lost"]
    if bound.seconds_lost is not None:
        known.append(f"{bound.seconds_lost:g} s of training")
    if bound.restore_seconds is not None:
        known.append(f"restored in {bound.restore_seconds:g} s")
    return f"{lost}: {bound.survives} on {bound.tier}, {', '.join(known)}"


def _drained(decision: DrainDecision) -> str:
    does = "gives way" if decision.displaced else "goes" if decision.proceeds else "waits"
    return f"{does} {decision.checkpoint} {decision.tier}: {decision.outlook}"


def _plan(view: View, what: str, tier: str, options: dict[str, str]) -> list[str]:
    if what == "eviction":
        made = plan_eviction(
            view, tier, need_bytes=int(options["need"]), free_bytes=int(options["free"])
        )
        drops = [f"{d.verdict} {d.checkpoint}: {d.reason}" for d in made.deletions]
        return [*drops, f"missing {made.missing_bytes}"] if made.missing_bytes else drops
    if what == "due":
        due_s = next_due_s(view, tier)
        return ["never" if due_s is None else f"at {due_s:g}"]
    if what == "relief":
        gone = plan_relief(view, tier, missing_bytes=int(options["missing"]))
        return [f"{d.verdict} {d.checkpoint} to {d.tier}: {d.reason}" for d in gone]
    plan = {"retention": plan_retention, "flush": plan_flush}.get(what)
    if plan is not None:
        return [f"{d.verdict} {d.checkpoint}: {d.reason}" for d in plan(view, tier)]
    fits = by_bytes(view, tier, int(options["need"]), free=int(options["free"]))
    return [
        f"{d.verdict} {d.checkpoint}: {d.reason}" for d in plan_superseding(view, tier, fits=fits)
    ]


def _yield(options: dict[str, str]) -> list[str]:
    idle, busy = ([float(each) for each in options[kind].split(",")] for kind in ("idle", "busy"))
    share, least = float(options["share"]), float(options["least"])
    messages = plan_yield(idle_s=idle, busy_s=busy, share=share, least=least)
    return [f"{messages.share:g}: {messages.reason}"]


def _forecast(tier: TierRules, options: dict[str, str]) -> list[str]:
    messages = forecast(
        tier,
        saves=int(options["saves"]),
        every_s=float(options["every"]),
        bytes=int(options["bytes"]),
        bytes_per_s=float(options["rate"]) if "rate" in options else None,
        stretches=int(options["stretches"]),
        waiting=int(options["waiting"]),
    )
    behind = 0.0 if messages.behind is None else messages.behind
    return [f"{behind:.2f} behind in an hour", *([messages.warning] if messages.warning else [])]


def _tier(words: list[str]) -> TierRules:
    name, kind = words[0], TierKind(words[1])
    options = _options(words)
    last, capacity = options.get("last"), options.get("capacity")
    return TierRules(
        name=name,
        kind=kind,
        survives=survives(kind, shared="shared" in words),
        flush_every=int(options.get("every", 1)),
        retain=retained(None if last is None else int(last)),
        capacity_bytes=None if capacity is None else int(capacity),
        evict_high=float(options["high"]) if "high" in options else None,
        evict_low=float(options["low"]) if "low" in options else None,
        evict=order(options["order"]) if "order" in options else None,
        within_s=float(options["within"]) if "within" in options else None,
        when_full=WhenFull(options["when_full"]) if "when_full" in options else _when_full(kind),
        flush_order=next((FLUSH_ORDERS[word] for word in words if word in FLUSH_ORDERS), None),
    )


def _retain(words: list[str]) -> tuple[Rule, ...]:
    """Read rules as the configuration does."""
    members: dict[str, object] = dict(_options(words))
    if "best" in members:
        metric, mode, count = str(members["best"]).split(":")
        members["best"] = {"metric": metric, "mode": mode, "count": count}
    if members.get("tags") not in (None, "true"):
        members["tags"] = str(members["tags"]).split(",")
    return RetainSection.model_validate(members).rules()


def _when_full(kind: TierKind) -> WhenFull | None:
    return WhenFull.SUPERSEDE if kind is TierKind.HOST else None


def _checkpoint(words: list[str]) -> CheckpointView:
    options = _options(words)
    copies = {}
    for name, value in options.items():
        if name not in ("ordinal", "from", "owed", "damaged", "saved", "tags", "size"):
            state, _, more = value.partition(":")
            copies[name] = CopyView(
                state=CopyState(state),
                bytes=int(options.get("size", COPY_BYTES)),
                leased=more == "leased",
                arrived_bytes=int(more) if more.isdigit() else 0,
            )
    id = _id(words[0])
    return CheckpointView(
        id=id,
        ordinal=int(options.get("ordinal", id.step)),
        started_from=_id(options["from"]) if "from" in options else None,
        abandoned="abandoned" in words,
        pinned="pinned" in words,
        deleted="deleted" in words,
        changing="settling" in words,
        copies=copies,
        owed=frozenset(options["owed"].split(",")) if "owed" in options else frozenset(),
        damaged={
            name: CopyView(state=CopyState.COMMITTED, bytes=COPY_BYTES)
            for name in options.get("damaged", "").split(",")
            if name
        },
        metrics={
            name: float(value)
            for name, _, value in (word.partition(":") for word in words[1:] if "=" not in word)
            if value
        },
        tags=frozenset(options["tags"].split(",")) if "tags" in options else frozenset(),
        wall_time_s=float(options["saved"]) if "saved" in options else None,
    )


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def _rates(words: list[str]) -> dict[str, float]:
    return {name: float(rate) for name, rate in _options(words).items()}


def _id(text: str) -> CheckpointId:
    step, _, attempt = text.partition("@")
    return CheckpointId(int(step), int(attempt))


def survivors(view: View, lost: LossClass) -> set[CheckpointId]:
    """Live checkpoints of which a durable copy outlives such a loss: a rule of the tests' own."""
    order = [LossClass.NONE, LossClass.PROCESS, LossClass.NODE, LossClass.SITE]
    return {
        checkpoint.id
        for checkpoint in view.checkpoints
        for tier in view.tiers
        if checkpoint.live
        and order.index(tier.survives) >= order.index(lost)
        and checkpoint.state(tier.name) is CopyState.COMMITTED
    }


def without(view: View, drops: set[tuple[str, CheckpointId]]) -> View:
    """The view once these copies, as (tier, checkpoint), are gone."""

    def left(id: CheckpointId, copies: Mapping[str, CopyView]) -> dict[str, CopyView]:
        return {tier: copy for tier, copy in copies.items() if (tier, id) not in drops}

    return replace(
        view,
        checkpoints=tuple(
            replace(c, copies=left(c.id, c.copies), damaged=left(c.id, c.damaged))
            for c in view.checkpoints
        ),
    )
