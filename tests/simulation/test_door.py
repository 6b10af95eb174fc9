"""The simulation uses a planner by its door alone, and the facts that come out are those of the run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.door import Answer, State
from tests.simulation.world import IMAGE, World, attempt_of, file_rules
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import AccessDeniedError, UnreachableError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.stored import StoredTier

HERE = Path(__file__).parent
KEPT = (
    "AbortShard",
    "CommandKind",
    "CommitCopy",
    "CopyRun",
    "DeleteCopy",
    "OpenShard",
    "ReadDecided",
    "Task",
)
"""The tasks, and the kinds of commands, that any planner knows: the simulation goes by them as they are carried out."""
INSIDE = (
    "door.py",
    "test_planted_bugs.py",
    "test_peer_bugs.py",
    "test_peer_recovery.py",
)
"""What names the present planner's parts: its door, and tests that say so at their top."""
FIRST = CheckpointId(1, 1)


def imported(tree: ast.Module) -> Iterator[str]:
    """What a module imports of the planner."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "core.flush" in (node.module or ""):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if "core.flush" in name.name)


def reached_into(tree: ast.Module) -> Iterator[int]:
    """The lines where a module reaches behind a door; what is there may be handed on as ``coordinator``."""
    handed_on = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.coordinator"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            is_planner = node.attr in ("planner", "coordinator") and node not in handed_on
            is_inside = node.attr.startswith("_") and ast.unparse(node.value).endswith("door")
            if is_planner or is_inside:
                yield node.lineno


def test_the_simulation_uses_a_planner_by_its_door_alone() -> None:
    seen: set[str] = set()
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        if path.name != "door.py":
            assert not list(reached_into(tree)), path.name
        if path.name not in INSIDE:
            seen.update(imported(tree))
    assert seen == set(KEPT)


def test_the_facts_of_a_checkpoint_follow_its_copies() -> None:
    world = World([file_rules("nvme")])
    world.save(1)
    known = world.door.checkpoints[FIRST]
    assert (known.in_memory, known.owed, known.state("nvme")) == (True, {"nvme"}, State.ARRIVING)
    assert known.copies["host"].bytes == IMAGE
    assert (known.ordinal, known.world_size, known.at_end) == (1, 1, False)
    assert world.door.is_busy
    assert world.door.is_copying
    assert world.door.owed == ((FIRST, "nvme"),)
    world.settle()
    known = world.door.checkpoints[FIRST]
    copy = known.copies["nvme"]
    assert (copy.state, copy.good, copy.readers, known.owed) == (State.THERE, True, 0, frozenset())
    assert copy.bytes > IMAGE
    assert world.door.whole_on("nvme") == {FIRST}
    assert world.door.counts["commits"] == {"nvme": 1}
    assert not world.door.is_busy
    world.crash()
    world.start()
    known = world.door.checkpoints[FIRST]
    assert known.state("nvme") is State.THERE
    assert not known.copies["nvme"].good, "this start has not read it"


def test_the_facts_say_what_a_command_has_decided_and_was_answered() -> None:
    world = World([file_rules("nvme")])
    world.save(1)
    world.settle()
    answers: list[Answer] = []
    world.door.command(CommandKind.PIN, FIRST, answers.append)
    world.settle()
    assert world.door.checkpoints[FIRST].pinned
    assert world.door.decided.is_pinned(FIRST, None)
    world.door.command(CommandKind.DELETE, FIRST, answers.append)
    world.settle()
    assert [list(failed) for failed in answers] == [[], ["tierfall"]]
    world.order(CommandKind.UNPIN, FIRST)
    world.order(CommandKind.DELETE, FIRST)
    assert world.door.checkpoints == {}
    assert world.door.counts["deleted_copies"] == {"nvme": 1}


def test_the_facts_say_which_tiers_are_unread_or_fail_and_what_was_set_aside() -> None:
    backends: list[Faulty] = []

    def wrap(name: str, inner: Backend) -> Backend:
        refusals = [
            Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, keys=keys, error=error)
            for keys, error in (
                ("run/step-00000002-*", AccessDeniedError),
                ("run/step-00000007-*/commit.json", UnreachableError),
            )
        ]
        backends.append(Faulty(inner, seed=0, plan=[replace(one, times=None) for one in refusals]))
        return backends[-1]

    world = World([file_rules("nvme")], wrap=wrap, memory_images=9)
    world.crash()
    world.start(unread=["nvme"])
    assert world.door.unread == {"nvme"}
    for step in range(1, 7):
        world.save(step)
        world.settle()
    assert world.door.checkpoints[CheckpointId(2, world.attempt.number)].set_aside == {"nvme"}
    assert world.door.counts["set_aside_copies"] == {"nvme": 1}
    assert "the next start tries it again" in str(world.door.errors[-1])
    assert not world.door.failing
    world.save(7)
    world.settle(limit_s=300.0)
    assert world.door.failing == {"nvme"}
    assert not world.door.is_fenced
    newer = attempt_of(world.attempt.number + 1, 99)
    StoredTier(name="nvme", run="run", backend=world.disks["nvme"]).fence.create(newer)
    backends[-1].stop()
    world.settle()
    assert world.door.is_fenced
