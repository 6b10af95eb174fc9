"""``watch``: beside a running trainer, after a dead one, and without any."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli
from rich.text import Text

import tierfall
from tests.contract.trainer import Trainer
from tests.steps import state_of, wait_until
from tests.stuck_tier import StuckTier
from tierfall.cli.look import RunView
from tierfall.core.format import documents
from tierfall.core.types.values import TierKind
from tierfall.ops.reader import RunSnapshot
from tierfall.telemetry import status

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
    config = {"chunk": "256KiB", "disk": {"bandwidth": "600kB/s"}}
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
    assert all(0.1e6 < t["bytes_per_s"] < 2e6 for t in seen if t["bytes_per_s"])
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


def test_a_trainer_that_says_nothing_for_long_may_hang(
    make_cli: MakeCli, train: Train, memory: Path
) -> None:
    cli = make_cli()
    trainer = train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the trainer's status")
    trainer.program.signal(signal.SIGSTOP)
    stat = Path(f"/proc/{trainer.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stands still")
    try:
        old = status.read_status(folder_in(memory), 0)
        assert old is not None
        output = old.model_copy(update={"wall_time_s": old.wall_time_s - 60})
        status.write_status(folder_in(memory), output)
        assert "its status is 1 min" in cli("watch", "--once").out
    finally:
        trainer.program.signal(signal.SIGCONT)


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


def test_a_link_in_the_place_of_a_status_is_not_followed(
    make_cli: MakeCli, train: Train, memory: Path, tmp_path: Path
) -> None:
    cli = make_cli()
    trainer = train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the trainer's status")
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


def test_nobody_else_can_read_a_status(make_cli: MakeCli, train: Train, memory: Path) -> None:
    cli = make_cli()
    train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the trainer's status")
    assert status_file(memory).stat().st_mode & 0o077 == 0


# For Prometheus --------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_wrong_uses_of_the_port_are_refused(make_cli: MakeCli, port: int) -> None:
    cli = make_cli()
    assert "'--prometheus': " in cli("watch", "--prometheus", "nine", code=2).err
    pytest.importorskip("prometheus_client")
    with socket.create_server(("", port)):
        err = cli("watch", "--prometheus", str(port), code=2).err
    assert f"--prometheus: *:{port} cannot be listened on" in err


def test_the_row_of_a_tier_that_fails_is_red() -> None:
    seen = RunSnapshot(
        wall_time_s=0.0, slots=(), live=None, last_status=None, events=(), problems=()
    )
    found = status.RunStatus(
        run="run",
        tiers={"host": TierKind.HOST, "far": TierKind.FILE},
        checkpoints=(),
        checkpoints_known=0,
        statistics=tierfall.Statistics(failing={"far": "far: no space is left"}),
    )
    shown = RunView(snapshot=seen, status=found, problems=()).shown()
    text = next(part for part in shown if isinstance(part, Text) and "KIND" in part.plain)
    (red,) = [text.plain[span.start : span.end] for span in text.spans if span.style == "red"]
    assert red.startswith("far ")
