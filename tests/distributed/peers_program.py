"""What one rank of a job with peer memory does: functions by name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from tests.contract import of_ranks
from tests.contract.kit import equal, wait_until
from tests.distributed import killing, program
from tests.distributed.program import NODE, RANK, main
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.errors import FlushError
from tierfall.tiers import host
from tierfall.tiers.peer_requests import PeerClient


def config(folder: str, **changes: Any) -> dict[str, Any]:
    """That of the contract's ranks; the wait is that of a loaded machine, for all to start."""
    given = {
        "run": "many",
        "max_wait": "30s",
        "interval": {"at_end": False, "every": 1},
        "peers": {},
        **changes,
        "pfs": {"flush": {"every": 100}, **changes.get("pfs", {})},
    }
    return of_ranks.config(folder, NODE, **given)


def make_state(step: int) -> dict[str, Any]:
    """The state of ``program``, and a tensor that is the same on all ranks."""
    return {**program.make_state(step), "step": torch.full((1,), float(step))}


def save_and_note(
    folder: str,
    steps: list[int],
    point: str = "",
    call: int = 1,
    victims: Sequence[int] = (),
    **changes: Any,
) -> None:
    """Save these steps, each until peer memory has it, which is noted; step 2 is on storage, too. The ``victims`` are
    killed at a point of the last one; else wait to be killed."""
    dist.init_process_group("gloo")
    with tierfall.open(config(folder, **changes)) as ckpt:
        assert ckpt.restore(make_state(0)) is None
        for step in steps:
            if step == steps[-1] and RANK in victims:
                killing.at_point(point, call, killing.kill_self, killing.PEER_POINTS)
            handle = ckpt.save(step, make_state(step))
            ckpt.wait_captured()
            handle.wait("peers", 30)
            note(folder, step)
            if step == 2:
                handle.wait("pfs", 30)
        Path(folder, f"ready-{RANK}").touch()
        time.sleep(600)


def bring_back(
    folder: str,
    point: str = "",
    call: int = 1,
    victims: Sequence[int] = (),
    late: bool = False,
    **changes: Any,
) -> None:
    """Restore, and wait until peer memory has that checkpoint on all nodes again, which is noted. The ``victims``
    are killed at a point of this start, ``late``: of the restore; else wait to be killed."""
    dist.init_process_group("gloo")

    def arm() -> None:
        if RANK in victims:
            killing.at_point(point, call, killing.kill_self, killing.PEER_POINTS)

    if not late:
        arm()
    with tierfall.open(config(folder, **changes)) as ckpt:
        if late:
            arm()
        state = make_state(0)
        restored = ckpt.restore(state)
        assert restored is not None
        assert equal(state, make_state(restored.step))
        wait_until(lambda: has_again(ckpt, restored.step), "peer memory has it again", 60)
        note(folder, restored.step, "again")
        Path(folder, f"ready-{RANK}").touch()
        time.sleep(600)


def carry_on(
    folder: str,
    round: int,
    steps: int,
    point: str = "",
    call: int = 1,
    victims: Sequence[int] = (),
    **changes: Any,
) -> dict[str, Any] | None:
    """Restore, and write to the file ``restored-ROUND-RANK`` what; then save so many steps more, each until peer memory
    has it, which is noted. The saved state names the round. The ``victims`` are killed at a point."""
    dist.init_process_group("gloo")
    if RANK in victims:
        killing.at_point(point, call, killing.kill_self, killing.PEER_POINTS)

    def state_of(step: int, round: int) -> dict[str, Any]:
        return {**make_state(step), "round": torch.full((1,), round)}

    with tierfall.open(config(folder, **changes)) as ckpt:
        state = state_of(0, 0)
        restored = ckpt.restore(state)
        step = 0 if restored is None else restored.step
        if restored is not None:
            by = int(state["round"])
            good = equal(state, state_of(step, by))
            read = [source.tier for source in restored.sources]
            answer = {"step": step, "round": by, "good": good, "tiers": read}
            Path(folder, f"restored-{round}-{RANK}.new").write_text(json.dumps(answer))
            Path(folder, f"restored-{round}-{RANK}.new").rename(
                Path(folder, f"restored-{round}-{RANK}")
            )
        for later in range(step + 1, step + 1 + steps):
            handle = ckpt.save(later, state_of(later, round))
            ckpt.wait_captured()
            handle.wait("peers", 30)
            note(folder, later, f"noted-{round}")
        return None


def note(folder: str, step: int, name: str = "durable") -> None:
    """Add a step to this rank's file, on disk before the next thing happens."""
    with Path(folder, f"{name}-{RANK}").open("a") as file:
        file.write(f"{step}\n")
        file.flush()
        os.fsync(file.fileno())


def outlast(folder: str, **changes: Any) -> dict[str, Any]:
    """Save step 1, and steps 2 and 3 while the other node does not answer to rank 0, which is in the middle of sending
    step 2; then wait until peer memory has step 3."""
    write: Any = PeerClient.write
    sending, behind = Path(folder, "sending"), Path(folder, "behind")

    def hold_up(
        client: PeerClient,
        id: CheckpointId,
        shard: Shard,
        upload: int,
        offset: int,
        view: memoryview,
    ) -> None:
        if id.step == 2 and offset and RANK == 0 and not sending.exists():
            sending.touch()
            time.sleep(1.0)  # the other node is stopped meanwhile
        write(client, id, shard, upload, offset, view)

    PeerClient.write = hold_up  # type: ignore[method-assign]
    with tierfall.open(config(folder, **changes)) as ckpt:
        ckpt.save(1, make_state(1)).wait("peers", 30)
        handle = ckpt.save(2, make_state(2))
        ckpt.wait_captured()
        wait_until(sending.exists, "step 2 is being sent", 60)
        if RANK:
            wait_until(behind.exists, "rank 0 is told of it", 60)  # it is stopped meanwhile
        began_s = time.monotonic()
        ckpt.save(3, make_state(3))
        ckpt.wait_captured()
        blocked_s = time.monotonic() - began_s
        if not RANK:
            wait_until(lambda: handle.exception() is not None, "the copy fails", 60)
            behind.touch()
        why = str(handle.exception())
        wait_until(
            lambda: any(c.step == 3 and "peers" in c.copies for c in ckpt.checkpoints()),
            "peer memory has step 3",
            60,
        )
    return {"blocked_s": blocked_s, "why": why}


def has_again(ckpt: tierfall.Checkpointer, step: int) -> bool:
    """Whether peer memory has a restored step on all nodes again; an older one may be there before."""
    survival = ckpt.statistics().peer_survival
    return survival is not None and survival.step >= step


def short_of_memory(folder: str, on: int, free: int, **changes: Any) -> dict[str, Any]:
    """Save two steps, while ``free`` bytes are free for the images of other nodes on rank ``on``."""
    if on == RANK:
        measure = host.measure_room

        def little(place: Path) -> Any:
            found = measure(place)
            is_for_others = "/peers-" in str(place)
            return replace(found, file_system_free_bytes=free) if is_for_others else found

        host.measure_room = little  # type: ignore[assignment]
    stored = {"flush": {"every": 1}}
    with tierfall.open(config(folder, pfs=stored, **changes)) as ckpt:
        why = ""
        for step in (1, 2):
            handle = ckpt.save(step, make_state(step))
            handle.wait("pfs", 30)
            with suppress(FlushError):  # what peer memory lacks may be found later
                handle.wait("peers", 30)
            why = why or str(handle.exception() or "")
        stored = [c.step for c in ckpt.checkpoints() if "pfs" in c.copies]
    return {"why": why, "stored": stored}


def resume(folder: str, saves: bool = False, **changes: Any) -> dict[str, Any] | None:
    """Restore, and return the step, whether it is bit for bit what this rank saved, and the bytes read by tier;
    with ``saves``, after a further step is in peer memory."""
    dist.init_process_group("gloo")
    with tierfall.open(config(folder, **changes)) as ckpt:
        state = make_state(0)
        report = ckpt.restore(state)
        if report is None:
            return None
        if saves:
            handle = ckpt.save(report.step + 1, make_state(report.step + 1))
            ckpt.wait_captured()
            handle.wait("peers", 30)
        return {
            "step": report.step,
            "good": equal(state, make_state(report.step)),
            "tiers": {source.tier: source.bytes for source in report.sources},
        }


if __name__ == "__main__":
    main(globals())
