"""``watch``: beside a running trainer, after a dead one, and without any."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Trainer

import tierfall
from tests.steps import state_of, wait_until
from tierfall.core.format import documents
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


def steps_of(document: dict[str, Any]) -> dict[int, dict[str, str]]:
    return {
        c["step"]: {tier: copy["state"] for tier, copy in c["copies"].items()}
        for c in document["checkpoints"]
    }


# A trainer that lives --------------------------------------------------------------------------------


def test_the_rate_of_a_first_copy_is_right_or_not_shown(make_cli: MakeCli) -> None:
    """All large chunks are written beside each other, and a small one is written first."""
    config = {"chunk": "1MiB", "host": {"capacity": "16MiB"}, "disk": {"bandwidth": "1MB/s"}}
    cli, seen = make_cli(**config), []
    with tierfall.open(cli.config) as ckpt:
        handle = ckpt.save(1, state_of(1, elements=1 << 20))
        while not handle.done("disk"):
            seen += cli.json("watch", "--once")["transfers"]
        handle, second = ckpt.save(2, state_of(2, elements=1 << 20)), []
        while not handle.done("disk"):
            second += cli.json("watch", "--once")["transfers"]
    assert any(t["bytes_per_s"] and t["left_s"] for t in second), "by then the rate is known"
    assert [t["phase"] for t in seen].count("copying") > 1
    assert all(0.2e6 < t["bytes_per_s"] < 3e6 for t in seen if t["bytes_per_s"])
    for t in seen:
        left = t["bytes"] - t["done_bytes"]
        rate = t["bytes_per_s"]
        assert t["left_s"] == (pytest.approx(left / rate) if rate else None)


def test_what_is_on_its_way_is_shown_with_how_much_of_it_is_there(
    make_cli: MakeCli, train: Train
) -> None:
    cli = make_cli(disk={}, slow={"bandwidth": "20kB/s"})
    trainer = train(cli)
    trainer.tell("capture 1")
    found = says(
        cli,
        lambda d: any(t["tier"] == "slow" and t["done_bytes"] for t in d["transfers"]),
        "the first chunk is on the slow tier",
    )
    (transfer,) = [t for t in found["transfers"] if t["tier"] == "slow"]
    assert (transfer["step"], transfer["phase"]) == (1, "copying")
    assert 0 < transfer["done_bytes"] < transfer["bytes"]
    (one,) = found["checkpoints"]
    assert one["copies"]["slow"]["state"] == "arriving"
    assert one["owed"] == ["slow"]
    assert 0 < one["copies"]["slow"]["fraction"] < 1
    out = cli("watch", "--once").out
    assert "arriving " in out
    assert re.search(r"1@1 +slow +copying", out)
    assert "arriving" in cli("ls").out


def test_a_trainer_that_says_nothing_for_long_may_hang(
    make_cli: MakeCli, train: Train, memory: Path
) -> None:
    cli = make_cli()
    trainer = train(cli)
    says(cli, lambda d: d["slots"][0]["alive"], "the trainer's status")
    trainer.stop()
    try:
        old = status.read_status(folder_in(memory), 0)
        assert old is not None
        output = old.model_copy(update={"wall_time_s": old.wall_time_s - 60})
        status.write_status(folder_in(memory), output)
        assert "its status is 1 min" in cli("watch", "--once").out
    finally:
        trainer.go_on()


# No trainer that lives -------------------------------------------------------------------------------


def test_a_dead_trainers_status_is_reported_to_be_so_with_its_age(
    make_cli: MakeCli, train: Train, memory: Path
) -> None:
    cli = make_cli(disk={}, slow={"bandwidth": "20kB/s"})
    trainer = train(cli)
    trainer.tell("capture 1")
    says(cli, lambda d: steps_of(d).get(1, {}).get("slow") == "arriving", "it is on its way")
    trainer.kill()
    found = cli.json("watch", "--once")
    (slot,) = found["slots"]
    assert (slot["alive"], slot["owner"], slot["pid"]) == (False, None, trainer.pid)
    assert found["transfers"] == [], "nothing is on its way any more"
    assert [t["tier"] for t in slot["transfers"]] == ["slow"], "but it was"
    assert steps_of(found)[1]["host"] == "sealed"
    out = cli("watch", "--once").out
    assert "no trainer is alive on this machine" in out
    assert f"process {trainer.pid} has ended; its last status, " in out
    assert "1@1 was being copied to slow: " in out
    assert "1@1  sealed  committed  " in out
    assert "arriving" not in out


# What is not to be believed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", documents.seal({"run": "run"}), documents.seal({"run": 7, "pid": "x"})],
    ids=["empty", "no envelope", "members missing", "wrong types"],
)
def test_a_status_that_is_none_is_reported_and_the_tiers_are_listed(
    make_cli: MakeCli, saved: Callable[..., None], memory: Path, data: bytes
) -> None:
    cli = make_cli()
    saved(cli, (1,))
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


def test_it_serves_metrics_and_health_of_a_trainer_until_it_is_interrupted(
    make_cli: MakeCli, train: Train, port: int
) -> None:
    pytest.importorskip("prometheus_client")
    cli = make_cli()
    trainer = train(cli)
    trainer.tell("save 1")
    watching = subprocess.Popen(
        [sys.executable, "-m", "tierfall", "watch", "-c", cli.path, "--prometheus", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        assert f"run run: /metrics and /healthz are served on port {port}" in (
            watching.stdout.readline()
        )

        def get(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return str(answer.read().decode())

        wait_until(
            lambda: 'commits_total{rank="0",run="run",tier="disk"} 1.0' in get("/metrics"), "step 1"
        )
        assert json.loads(get("/healthz")) == {"healthy": True, "reasons": []}
        trainer.kill()
        with pytest.raises(urllib.error.HTTPError) as refused:
            get("/healthz")
        with refused.value as answer:
            assert "no trainer of it is alive" in answer.read().decode()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
    finally:
        watching.kill()
        watching.communicate()


def test_wrong_uses_of_the_port_are_refused(make_cli: MakeCli, port: int) -> None:
    cli = make_cli()
    assert "--once and --prometheus" in cli("watch", "--once", "--prometheus", "1", code=2).err
    assert "--prometheus: " in cli("watch", "--prometheus", "nine", code=2).err
    pytest.importorskip("prometheus_client")
    with socket.create_server(("", port)):
        err = cli("watch", "--prometheus", str(port), code=2).err
    assert f"--prometheus: *:{port} cannot be listened on" in err
