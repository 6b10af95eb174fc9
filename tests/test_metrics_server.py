"""The HTTP server of metrics and health: in the training process and beside it."""

from __future__ import annotations

import builtins
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import kill_all
from tests.rank_kit import config_of
from tests.steps import state_of, wait_until
from tests.test_bad_input import in_a_child
from tierfall.config import Config, load_config
from tierfall.config.sections import MetricsSection
from tierfall.core.ranks.ranks import Ranks
from tierfall.errors import ConfigError, RanksError
from tierfall.ops.watch import Watcher
from tierfall.run.checkpointer import Checkpointer
from tierfall.session import status_writer
from tierfall.telemetry.prometheus import MetricsServer

parser = pytest.importorskip("prometheus_client.parser")
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


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return every sample as Prometheus reads it: by its name and the values of its labels, without the run's."""
    status, text = get(port, "/metrics")
    assert status == 200
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("run", "rank")}
            found[(sample.name, *labels.values())] = sample.value
    return found


def health(port: int) -> tuple[int, list[str]]:
    status, text = get(port, "/healthz")
    document = json.loads(text)
    assert document["healthy"] is (status == 200)
    return status, document["reasons"]


# In the training process -----------------------------------------------------------------------------


def test_labels_name_run_and_rank_and_openmetrics_is_spoken(
    served: dict[str, Any], port: int
) -> None:
    with tierfall.open(served) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: ("tierfall_commits_total", "far") in scrape(port), "a status")
        _, text = get(port, "/metrics")
        assert 'tierfall_step{rank="0",run="run"} 1.0' in text
        _, text = get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        assert get(port, "/other")[0] == 404


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


@pytest.mark.parametrize("wrong", [0, 65536, "nine", "a b:9109", True, 9109.5, "127.0.0.1"])
def test_what_is_no_port_is_refused(make_config: MakeConfig, wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"metrics.prometheus: .*expected a port from 1 to 65535"):
        load_config(make_config() | {"metrics": {"prometheus": wrong}})


@pytest.mark.parametrize(
    ("value", "address"),
    [(9109, ("", 9109)), ("9109", ("", 9109)), (":9109", ("", 9109)), ("::1:9109", ("::1", 9109))],
)
def test_a_port_may_be_written_in_several_ways(
    make_config: MakeConfig, value: object, address: tuple[str, int]
) -> None:
    section = load_config(make_config() | {"metrics": {"prometheus": value}}).metrics
    assert section is not None
    assert section.listens_on == address


def test_a_forked_child_does_not_keep_the_port(served: dict[str, Any], port: int) -> None:
    with tierfall.open(served):
        listening = f"socket:[{inode_of(port)}]"
        assert in_a_child(count_sockets_of(listening)) == "ValueError: 0"
        with pytest.raises(ValueError, match=r"^1$"):
            count_sockets_of(listening)()
        assert health(port)[0] == 200


def inode_of(port: int) -> str:
    """The inode of the socket that listens on a port."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
            return fields[9]
    raise AssertionError(port)


def count_sockets_of(listening: str) -> Callable[[], None]:
    def count() -> None:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:  # that of the listing itself
                continue
        raise ValueError(str(links.count(listening)))

    return count


def served_of_ranks(folder: Path, port: int) -> Config:
    return config_of(folder).model_copy(update={"metrics": MetricsSection(prometheus=port)})


def test_the_first_rank_of_each_node_serves(tmp_path: Path, port: int) -> None:
    settings = served_of_ranks(tmp_path, port)
    with network(["a", "a"]) as ranks:
        both = on_all([lambda r=r: Checkpointer(settings, run="run", ranks=r) for r in ranks])  # type: ignore[misc]
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
            Checkpointer(settings, run="run", ranks=ranks)
        except (ConfigError, RanksError) as error:
            return f"{type(error).__name__}: {error}"
        return "opened"

    with network(["a", "a"]) as ranks, socket.create_server(("", port)):
        first, second = on_all([lambda r=r: open_rank(r) for r in ranks])  # type: ignore[misc]
    assert first.startswith(
        f"ConfigError: open: metrics.prometheus: *:{port} cannot be listened on"
    )
    assert second.startswith("RanksError: open: rank 0: open: metrics.prometheus: ")


# Beside it -------------------------------------------------------------------------------------------


@pytest.fixture
def beside(make_config: MakeConfig, port: int) -> Iterator[dict[str, Any]]:
    """A server that reads the status files of a run."""
    config = make_config()
    with Watcher(load_config(config), run="run") as watcher:
        server = MetricsServer.listen(
            "", port, watcher.living_statuses, run="run", where="--prometheus"
        )
        yield config
        server.close()


def test_a_server_beside_the_trainer_sees_it_come_and_go(beside: dict[str, Any], port: int) -> None:
    assert health(port) == (503, ["run run: no trainer of it is alive on this machine"])
    assert scrape(port) == {("tierfall_up",): 0}
    with tierfall.open(beside) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: scrape(port).get(("tierfall_commits_total", "disk")) == 1, "the commit")
        assert health(port) == (200, [])
        found = scrape(port)
        assert (found["tierfall_up",], found["tierfall_step",]) == (1, 1)
    assert scrape(port) == {("tierfall_up",): 0}
