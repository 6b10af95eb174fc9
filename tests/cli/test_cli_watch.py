"""``watch``: beside a running trainer, after a dead one, and without any."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.contract.trainer import Trainer
from tests.steps import state_of, wait_until
from tests.stuck_tier import StuckTier
from tierfall.core.format import documents

MakeCli = Callable[..., Cli]
Train = Callable[[Cli], Trainer]


def folder_in(memory: Path) -> Path:
    """The one folder of host memory of the run."""
    return next((memory / "run").iterdir())


def status_file(memory: Path) -> Path:
    return folder_in(memory) / "slot-0.status.json"


def says(cli: Cli, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Wait until ``watch`` shows something; a status is up to a second old."""
    found: dict[str, Any] = {}

    def look() -> bool:
        found.clear()
        found.update(cli.json("watch", "--once"))
        return bool(found["slots"]) and condition(found)

    wait_until(look, what)
    return found


# A trainer that lives --------------------------------------------------------------------------------


def test_the_rate_of_a_first_copy_is_right_or_not_shown(make_cli: MakeCli) -> None:
    """All large chunks are written beside each other, and a small one is written first."""
    config = {"chunk": "256KiB", "disk": {"bandwidth": "1200kB/s"}}
    cli, seen = make_cli(**config), []
    with tierfall.open(cli.config) as ckpt:
        handle = ckpt.save(1, state_of(1, elements=3 << 17))
        while not handle.done("disk"):
            time.sleep(0.1)
            seen += cli.json("watch", "--once")["transfers"]
        handle, second = ckpt.save(2, state_of(2, elements=3 << 17)), []
        while not handle.done("disk"):
            time.sleep(0.1)
            second += cli.json("watch", "--once")["transfers"]
    assert any(t["bytes_per_s"] and t["left_s"] for t in second), "by then the rate is known"
    assert [t["phase"] for t in seen].count("copying") > 1
    assert all(0.2e6 < t["bytes_per_s"] < 4e6 for t in seen if t["bytes_per_s"])
    for t in seen:
        left = t["bytes"] - t["done_bytes"]
        rate = t["bytes_per_s"]
        assert t["left_s"] == (pytest.approx(left / rate) if rate else None)


@pytest.mark.parametrize("call", ["delete", "delete_some"])
def test_ls_calls_a_copy_leaving_while_its_trainer_deletes_it(
    call: str, make_cli: MakeCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its commit record is deleted, and after: without it the copy was taken for one that arrives."""
    cli, stuck = make_cli(disk={"retain": {"last": 1}}), StuckTier(tmp_path / "disk", monkeypatch)

    def line(word: str, command: str = "ls") -> str:
        found = [x for x in cli(*command.split()).out.splitlines() if x.split()[:1] == ["1@1"]]
        return found[0] if found and word in found[0] else ""

    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        stuck.hang_in(call)
        ckpt.save(2, state_of(2), block=True)
        assert stuck.hung.wait(30)
        wait_until(lambda: bool(line("leaving", "watch --once")), "the trainer says it")
        assert line("leaving")
        stuck.gate.set()
        wait_until(lambda: not line("leaving"), "it is gone")


# What is not to be believed --------------------------------------------------------------------------


def test_a_status_that_is_none_is_reported_and_the_tiers_are_listed(
    make_cli: MakeCli, saved: Callable[..., None], memory: Path
) -> None:
    cli = make_cli()
    saved(cli, (1,))
    for data in (
        b"",
        b"{}",
        documents.seal({"run": "run"}),
        documents.seal({"run": 7, "pid": "x"}),
    ):
        status_file(memory).write_bytes(data)
        answer = cli("watch", "--once", code=1)
        assert str(status_file(memory)) in answer.err
        assert "committed" in answer.out


def test_a_status_is_private_and_a_link_in_its_place_is_not_followed(
    make_cli: MakeCli, train: Train, memory: Path, tmp_path: Path
) -> None:
    cli = make_cli()
    trainer = train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the trainer's status")
    assert status_file(memory).stat().st_mode & 0o077 == 0
    target = tmp_path / "elsewhere"
    target.write_text("not to be touched")
    trainer.kill()
    status_file(memory).unlink()
    status_file(memory).symlink_to(target)
    assert "is a link or a pipe" in cli("watch", "--once", code=1).err
    train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the next trainer's status")
    assert target.read_text() == "not to be touched"
    assert not status_file(memory).is_symlink()
