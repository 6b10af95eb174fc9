"""The HTTP server of metrics and health: in the training process and beside it."""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import kill_all
from tests.rank_kit import config_of
from tests.steps import wait_until
from tierfall.config import Config
from tierfall.config.model import MetricsSection
from tierfall.core.ranks.ranks import Ranks
from tierfall.errors import ConfigError, RanksError
from tierfall.run import status_writer
from tierfall.run.checkpointer import Checkpointer

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "EVERY_S", 0.02)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def served(make_config: MakeConfig, port: int) -> dict[str, Any]:
    return make_config(disk={}, far={}) | {"metrics": {"prometheus": f"127.0.0.1:{port}"}}


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Return the status and the body of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health(port: int) -> tuple[int, list[str]]:
    status, text = get(port, "/healthz")
    document = json.loads(text)
    assert document["healthy"] is (status == 200)
    return status, document["reasons"]


# In the training process -----------------------------------------------------------------------------


def test_without_the_package_open_says_what_to_install(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"^open: metrics.prometheus: .*pip install 'tierfall\[prometheus\]'"
    ):
        tierfall.open(served)


def test_a_forked_child_does_not_keep_the_port(served: dict[str, Any], port: int) -> None:
    with tierfall.open(served):
        wait_until(lambda: health(port)[0] == 200, "a status")
        forked, told = os.pipe()
        child = os.fork()
        if not child:
            os.write(told, b"after the fork")
            signal.pause()
        os.read(forked, 1)
        assert health(port)[0] == 200, "its parent serves on"
    try:
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(forked)
        os.close(told)


def served_of_ranks(folder: Path, port: int) -> Config:
    return config_of(folder).model_copy(update={"metrics": MetricsSection(prometheus=port)})


def test_the_first_rank_of_each_node_serves(tmp_path: Path, port: int) -> None:
    settings = served_of_ranks(tmp_path, port)
    with network(["a", "a"]) as ranks:
        both = on_all([lambda r=r: Checkpointer(settings, ranks=r) for r in ranks])  # type: ignore[misc]
        try:
            wait_until(lambda: health(port)[0] == 200, "a status")
            labels = re.findall(r'_healthy\{rank="(\d)"', get(port, "/metrics")[1])
            assert labels == ["0"]
        finally:
            kill_all(both)


def test_a_port_in_use_on_one_rank_is_an_error_on_all(tmp_path: Path, port: int) -> None:
    settings = served_of_ranks(tmp_path, port)

    def open_rank(ranks: Ranks) -> str:
        try:
            Checkpointer(settings, ranks=ranks)
        except (ConfigError, RanksError) as error:
            return f"{type(error).__name__}: {error}"
        return "opened"

    with network(["a", "a"]) as ranks, socket.create_server(("", port)):
        first, second = on_all([lambda r=r: open_rank(r) for r in ranks])  # type: ignore[misc]
    assert first.startswith(
        f"ConfigError: open: metrics.prometheus: *:{port} cannot be listened on"
    )
    assert second.startswith("RanksError: open: rank 0: open: metrics.prometheus: ")
