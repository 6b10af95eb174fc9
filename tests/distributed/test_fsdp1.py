"""FSDP1 is refused by name, on each rank and at once: its state_dict() is a collective that others may not come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("fsdp1_program.py")


def test_a_model_sharded_by_fsdp1_is_refused_at_save_and_at_restore(
    make_job: Callable[..., Job],
) -> None:
    for answer in make_job(2, program=PROGRAM).run("trouble", timeout_s=90):
        assert set(answer) == {"said", "steps"}, answer
        assert set(answer["said"]) == {
            "save whole",
            "restore whole",
            "save partly",
            "restore partly",
        }
        for name, said in answer["said"].items():
            assert ('state["model"] is sharded' if "save" in name else "\n  model: is") in said, (
                name
            )
            assert "FullyShardedDataParallel (FSDP1)" in said, name
            assert "fully_shard (FSDP2)" in said, name
        assert answer["steps"] == [1, 4], "what goes on is as if nothing had been"
