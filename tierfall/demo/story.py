"""The acts of the demo: train, kill during a flush, continue, damage a copy, lose the node, compare, and sum up.

Each act is a function of a ``Stage``. An act whose result is not the expected one raises DemoError.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.format.catalog import Listing, merge
from tierfall.core.types.units import format_duration, format_share, format_size
from tierfall.core.types.values import CheckpointId
from tierfall.demo import chain as chains
from tierfall.demo.chain import FAST, HOST, STORE, Chain
from tierfall.demo.process import Act, DemoError, Line, Trainer, id_of
from tierfall.demo.screen import Screen, TierProgress
from tierfall.telemetry.event_log import LogTail

KILL_FROM = 0.5
"""The kill comes after this share of the steps, as soon as a copy is under way to the object tier."""
UNDER_WAY = 0.2
"""After this share of the time that the copy before it took, a copy is under way plainly."""
SETTLE_S = 0.2
"""By then a store on this machine has answered what a frozen trainer had asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The context of all acts. ``pace_s`` is the least duration of a step that may save; ``events`` reads the event log
    of the run, across acts."""

    screen: Screen
    chain: Chain
    steps: int
    every: int
    small: bool
    pace_s: float = 0.0
    events: LogTail
    progress: TierProgress = field(default_factory=TierProgress)

    def start(self, name: str, *, saves: bool = True) -> Trainer:
        """Start a trainer process; leaving its ``with`` kills it if it is still running."""
        return Trainer(
            name,
            folder=self.chain.logs,
            config=self.chain.config_path if saves else None,
            steps=self.steps,
            small=self.small,
            pace_s=self.pace_s if saves else 0.0,
            events=self.events if saves else None,
        )

    def follow(self, trainer: Trainer, *, saves: bool = True) -> Generator[Line]:
        """Yield each line of a trainer, to its end, after printing it. Of the steps between two saves one line remains
        on screen; of a training without saves, one per four times as many steps."""
        steps_per_line = self.every if saves else 4 * self.every
        with trainer, self.screen.training():
            for line in trainer.follow():
                self.progress.add(line)
                if line["kind"] == "step":
                    keep = line["step"] % steps_per_line == steps_per_line // 2
                    self.screen.step(line, self.progress if saves else None, keep=keep)
                yield line

    def run(self, trainer: Trainer, *, saves: bool = True) -> Act:
        """Run a trainer to its end."""
        for _ in self.follow(trainer, saves=saves):
            pass
        return trainer.act


# 1 and 2: train, and kill -----------------------------------------------------------------------------


def train_and_kill(stage: Stage) -> tuple[Act, CheckpointId]:
    """Train until a copy is arriving on the object tier, then kill the trainer; return that copy's checkpoint."""
    trainer = stage.start("first")
    with closing(stage.follow(trainer)) as lines:
        for line in lines:
            if line["kind"] != "step" or not _is_time_to_kill(stage, trainer.act, line["step"]):
                continue
            if not trainer.freeze():
                break
            took_s = _under_way_s(stage)
            time.sleep(SETTLE_S)
            interrupted = id_of(stage.progress.arriving[STORE])
            if not _matches_event_log(stage, trainer, interrupted):
                trainer.thaw()
                continue
            trainer.kill()
            stage.screen.head(2, "Kill it in the middle of a flush")
            stage.screen.print(
                f"  step {line['step']}: checkpoint {interrupted.step} has been arriving on {STORE} for "
                f"{format_duration(took_s)}, and the copy before it took {format_duration(_usual_s(trainer.act))}. "
                f"[bold red]SIGKILL[/bold red] to process {trainer.pid}"
            )
            return trainer.act, interrupted
    raise DemoError(
        f"no copy was found arriving on {STORE} between step {stage.steps * KILL_FROM:g} and {stage.steps}, though a "
        "copy takes longer than the time between saves: run the demo with more --steps, and with no other load"
    )


def _is_time_to_kill(stage: Stage, act: Act, step: int) -> bool:
    """Return whether a copy is arriving on the object tier that the next start will finish."""
    copy = stage.progress.arriving.get(STORE)
    if copy is None or step < KILL_FROM * stage.steps:
        return False
    usual_s = _usual_s(act)
    return (
        usual_s > 0
        and _under_way_s(stage) >= UNDER_WAY * usual_s
        # A copy begins before its image is sealed, and an unsealed image does not survive the trainer.
        and id_of(copy) in map(id_of, act.of("captured"))
        # With two newer copies due, retention would not keep an older one, and the next start would not finish it.
        and step < copy["step"] + 4 * stage.every
    )


def _under_way_s(stage: Stage) -> float:
    return float(time.time() - stage.progress.arriving[STORE]["wall_time_s"])


def _usual_s(act: Act) -> float:
    """Return how long the last copy to the object tier took, in seconds; 0 before the first."""
    done = [line for line in act.of("flush_done") if line["tier"] == STORE]
    return float(done[-1]["seconds"]) if done else 0.0


def _matches_event_log(stage: Stage, trainer: Trainer, interrupted: CheckpointId) -> bool:
    """Return whether, while the trainer is stopped, the copy has no commit record yet, and the event log has an event
    of every image: a kill loses events that are not written."""
    for line in trainer.read():
        stage.progress.add(line)
    listings = chains.list_tiers(stage.chain)
    logged = {id_of(line) for line in trainer.act.of("captured")}
    return (
        listings[STORE].copy(interrupted) is None
        and {c.id for c in listings[HOST].copies} <= logged
    )


# 3: what is left --------------------------------------------------------------------------------------


def show_what_is_left(stage: Stage, interrupted: CheckpointId) -> dict[str, Listing]:
    """Print what each tier holds; DemoError if the interrupted copy counts as a checkpoint."""
    listings = chains.list_tiers(stage.chain)
    if listings[STORE].copy(interrupted) is not None:
        raise DemoError(
            f"checkpoint {interrupted} is committed on {STORE} although its copy was interrupted"
        )
    show_tiers(stage, listings, interrupted)
    stage.screen.print(
        f"  {STORE} has no commit record of checkpoint {interrupted.step}: the bytes that arrived do not count"
    )
    return listings


def show_tiers(
    stage: Stage, listings: Mapping[str, Listing], interrupted: CheckpointId | None = None
) -> None:
    """Print the copies on each tier; ``interrupted`` is a copy that was interrupted on the object tier."""
    rows = []
    for checkpoint in merge(listings.values()):
        states = [
            str(checkpoint.copies[name].state) if name in checkpoint.copies else "-"
            for name in listings
        ]
        if checkpoint.id == interrupted:
            states[list(listings).index(STORE)] = "interrupted"
        size = format_size(checkpoint.commit.image_bytes) if checkpoint.commit else "?"
        rows.append([str(checkpoint.id.step), str(checkpoint.id.attempt), size, *states])
    stage.screen.table(["step", "attempt", "size", *listings], rows)


# 4: continue ------------------------------------------------------------------------------------------


def restart(stage: Stage, left: Mapping[str, Listing]) -> Act:
    """Start the trainer again: it restores, finishes the owed copies, and trains to the end."""
    owed = chains.still_owed(stage.chain, left)
    for id, tier in sorted(owed):
        stage.screen.print(f"  {tier} is still owed checkpoint {id} by the process that was killed")
    trainer = stage.start("again")
    for line in stage.follow(trainer):
        if line["kind"] == "ready":
            show_restored(stage, check_restored(trainer.act, merge(left.values())[-1].id))
        elif line["kind"] == "committed" and (copy := (id_of(line), line["tier"])) in owed:
            owed.remove(copy)
            stage.screen.print(
                f"  [green]finished by adoption: checkpoint {copy[0]} is committed on {copy[1]}[/green]"
            )
    if owed:
        raise DemoError(
            f"copies that the killed process had not finished are still missing: {sorted(owed)}"
        )
    return trainer.act


def check_restored(act: Act, newest: CheckpointId) -> Line:
    """Return the ``restored`` line of a start; DemoError if it restored nothing, or another checkpoint than
    ``newest``."""
    restored = act.restored
    if restored is None:
        raise DemoError(f"a start restored nothing, although checkpoint {newest} exists")
    if id_of(restored) != newest:
        raise DemoError(
            f"a start restored step {restored['step']} of attempt {restored['attempt']}, not the newest "
            f"checkpoint, {newest}"
        )
    return restored


def show_restored(stage: Stage, restored: Line) -> None:
    """Print the restored step, the skipped sources, and the tiers that the bytes came from."""
    stage.screen.print(
        f"  restored step [bold]{restored['step']}[/bold] (attempt {restored['attempt']}) "
        f"in {format_duration(restored['seconds'])}"
    )
    for what, reason in restored["fallbacks"]:
        stage.screen.print(f"  skipped: [yellow]{what}[/yellow]")
        stage.screen.quote(reason)
    for shard, tier, count in restored["sources"]:
        stage.screen.print(f"  {shard}: {format_size(count)} from [bold green]{tier}[/bold green]")


# 5: damage --------------------------------------------------------------------------------------------


def damage_and_restore(stage: Stage, saved: str) -> tuple[Act, float]:
    """Damage the fastest tier's copy; a new process must restore the same bytes, whose digest is ``saved``.

    Returns its act, and the time of the damage.
    """
    listings = chains.list_tiers(stage.chain)
    show_tiers(stage, listings)
    if listings[HOST].copies:
        raise DemoError(f"{HOST} still holds checkpoints after a clean close")
    newest = listings[FAST].copies[-1].id
    path, offset = chains.flip_byte(stage.chain, FAST, newest)
    damaged_s = time.time()
    stage.screen.print(f"  byte {offset} of {path.relative_to(stage.chain.folder)} is flipped")
    return _restore_in_new_process(stage, "damaged", newest, saved, FAST, STORE), damaged_s


def _restore_in_new_process(
    stage: Stage, name: str, newest: CheckpointId, saved: str, *tiers: str
) -> Act:
    """Restore in a new process; DemoError if it restores other bytes, or from other tiers than ``tiers``."""
    act = stage.run(stage.start(name))
    restored = check_restored(act, newest)
    check_sources(restored, *tiers)
    if act.fingerprint("ready") != saved:
        raise DemoError("the restored bytes differ from the saved ones")
    show_restored(stage, restored)
    stage.screen.print("  [bold green]the same bytes as were saved[/bold green]")
    return act


def check_sources(restored: Line, *tiers: str) -> None:
    """Raise DemoError unless the bytes came from exactly these tiers, with a reason if there are several."""
    found = sorted({tier for _, tier, _ in restored["sources"]})
    if found != sorted(tiers) or (len(tiers) > 1 and not restored["fallbacks"]):
        reasons = ", and the reason" if len(tiers) > 1 else " alone"
        raise DemoError(
            f"step {restored['step']} was restored from {', '.join(found)}; expected {' and '.join(tiers)}{reasons}"
        )


# 6: lose the node -------------------------------------------------------------------------------------


def lose_node_and_restore(stage: Stage, saved: str) -> tuple[Act, float]:
    """Delete the storage of this node; a new process must restore the same bytes from the object tier alone.

    Returns its act, and the time of the loss.
    """
    newest = lose_node(stage)
    lost_s = time.time()
    return _restore_in_new_process(stage, "elsewhere", newest, saved, STORE), lost_s


def lose_node(stage: Stage) -> CheckpointId:
    """Delete host memory and the file tier's folder; return the newest remaining checkpoint.

    DemoError unless the object tier, and only it, still has copies.
    """
    chains.delete_node_storage(stage.chain)
    listings = chains.list_tiers(stage.chain)
    left = [name for name, listing in listings.items() if listing.copies]
    if left != [STORE]:
        raise DemoError(
            f"with the node lost, only {STORE} should hold checkpoints; found some on: {', '.join(left) or 'no tier'}"
        )
    stage.screen.print(f"  host memory and the folder {FAST}/ are removed; {STORE} alone is left")
    return listings[STORE].copies[-1].id


# 7: the undisturbed training --------------------------------------------------------------------------


def compare(stage: Stage, first: Act, again: Act, undisturbed: Act) -> tuple[int, int]:
    """Compare losses and the final state bit for bit; return the number of losses before the kill and after the
    restore.

    DemoError if anything differs.
    """
    expected = {line["step"]: line["loss"] for line in undisturbed.of("step")}
    before = check_equal(first.of("step"), expected, "before the kill")
    after = check_equal(again.of("step"), expected, "after the restore")
    assert again.restored is not None
    if after != stage.steps - again.restored["step"] or not after:
        raise DemoError(f"only {after} steps were trained after the restore")
    if again.fingerprint("ended") != undisturbed.fingerprint("ended"):
        raise DemoError("the losses are equal, but the final model or optimizer state differs")
    stage.screen.print(
        f"  [bold green]equal to the last bit[/bold green]: {after} losses after the restore, {before} before the kill"
    )
    stage.screen.print("  equal too: every byte of model and optimizer state after the last step")
    return before, after


def check_equal(steps: Sequence[Line], expected: Mapping[int, str], when: str) -> int:
    """Return the number of losses compared; DemoError names the first difference."""
    for line in steps:
        if line["loss"] != expected.get(line["step"]):
            raise DemoError(
                f"the loss of step {line['step']}, {when}, is {line['loss']}; the undisturbed run has "
                f"{expected.get(line['step'])}: the continuation is not exact"
            )
    return len(steps)


# 8: the summary ---------------------------------------------------------------------------------------


def sum_up(stage: Stage, acts: Sequence[Act]) -> dict[str, Any]:
    """Print and return the cost of saving, over all starts that saved."""
    captured = [line for act in acts for line in act.of("captured")]
    image_bytes = max(line["bytes"] for line in captured)
    blocked_s = sum(line["blocked_s"] for line in captured)
    trained_s = sum(line["seconds"] for act in acts for line in act.of("step"))
    edges: Counter[str] = Counter()
    for done in (line for act in acts for line in act.of("flush_done")):
        for source, count in done["sources"].items():
            edges[f"{source}->{done['tier']}"] += count
    stored = [line for act in acts for line in act.of("committed") if line["tier"] == STORE]
    packed = {
        "raw_bytes": image_bytes * len(stored),
        "stored_bytes": sum(line["bytes"] for line in stored),
    }
    print_line = stage.screen.print
    print_line(
        f"  {len(captured)} saves of {format_size(image_bytes)} blocked {format_duration(trained_s)} of training for "
        f"{format_duration(blocked_s)}: [bold]{format_share(blocked_s / trained_s)}[/bold]"
    )
    width = max(map(len, edges), default=0) + 2
    for edge, count in sorted(edges.items()):
        print_line(f"  {edge.replace('->', ' -> '):<{width}}  {format_size(count)}")
    print_line(
        f"  {STORE} packed {format_size(packed['raw_bytes'])} into {format_size(packed['stored_bytes'])}: "
        f"[bold]{packed['raw_bytes'] / packed['stored_bytes']:.3g} to 1[/bold]"
    )
    return {
        "saves": len(captured),
        "image_bytes": image_bytes,
        "blocked_s": blocked_s,
        "trained_s": trained_s,
        "edge_bytes": dict(edges),
        "packed": {STORE: packed},
    }
