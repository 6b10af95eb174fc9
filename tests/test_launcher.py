"""A process finds its rank from what launchers set, and meets the other ranks."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from tests.core.ranks.processes import serve
from tierfall.config import Config
from tierfall.core.types.errors import ConfigError, RanksError
from tierfall.launch import launcher

LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def config(tiers: Any = "./checkpoints", **more: Any) -> Config:
    return Config.model_validate({"run": "run", "max_wait": "1s", "tiers": tiers, **more})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in LAUNCHERS or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_all(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": 1}, (0, 1)),
        ({"WORLD_SIZE": 1, "RANK": 3}, (0, 1)),
        ({"WORLD_SIZE": 8, "RANK": 3}, (3, 8)),
        ({"SLURM_STEP_ID": 0, "SLURM_PROCID": 3, "SLURM_NTASKS": 8}, (3, 8)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_NODEID": 0}, (0, 1)),  # a batch script
        (
            {"WORLD_SIZE": 4, "RANK": 1, "SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_NTASKS": 1},
            (1, 4),
        ),
    ],
    ids=str,
)
def test_rank_and_size_are_what_the_launcher_says(
    env: Any, values: dict[str, int], expected: tuple[int, int]
) -> None:
    env(**values)
    assert launcher._rank_and_size(None) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, expected a number"),
        ({"WORLD_SIZE": 2}, "RANK is '' in the environment, expected a number"),
        ({"WORLD_SIZE": 2, "RANK": "²"}, "RANK is '²' in the environment"),
        ({"WORLD_SIZE": 2, "RANK": "-1"}, "RANK is '-1' in the environment"),
        ({"WORLD_SIZE": 2, "RANK": 2}, "RANK is 2 and WORLD_SIZE is 2 in the environment"),
        ({"WORLD_SIZE": 0, "RANK": 0}, "RANK is 0 and WORLD_SIZE is 0 in the environment"),
        ({"SLURM_STEP_ID": 1, "SLURM_PROCID": 1}, "SLURM_NTASKS is '' in the environment"),
        ({"WORLD_SIZE": 2, "RANK": 1}, "there are other ranks, but no address to connect to them"),
        ({"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "a"}, "no address to connect to them"),
        (
            {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "no address to connect",
        ),
    ],
    ids=str,
)
def test_an_environment_that_makes_no_sense_is_a_config_error(
    env: Any, values: dict[str, object], message: str
) -> None:
    env(**values)
    with pytest.raises(ConfigError, match=message):
        launcher.find_ranks(config())


def test_nobody_at_master_port(env: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    env(WORLD_SIZE=2, RANK=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(RanksError, match=f"no store answers at 127.0.0.1:{port}") as caught:
        launcher.find_ranks(config())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("rank", "message"), [(1, "rank 1 met no rank 0"), (0, "rank 1 did not call open")]
)
def test_the_others_are_waited_for_as_long_as_max_wait(env: Any, rank: int, message: str) -> None:
    store = serve()
    env(WORLD_SIZE=2, RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port)
    with pytest.raises(RanksError, match=f"{message} within 1 s"):
        launcher.find_ranks(config())
