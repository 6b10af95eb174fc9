"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.contract.kit import Place
from tests.contract.trainer import Trainer, trainers
from tests.steps import blank, state_of


@pytest.fixture
def make_cli(make_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Cli]:
    """``make_cli(disk={...})``: the command line on a configuration of ``make_config``."""

    def make(**words: Any) -> Cli:
        return Cli(tmp_path, make_config(**words))

    return make


@pytest.fixture
def saved() -> Callable[..., None]:
    """``saved(cli, range(1, 4), keep=...)``: save these steps to every tier, and close."""

    def save(cli: Cli, steps: Any, **words: Any) -> None:
        with tierfall.open(cli.config) as ckpt:
            ckpt.restore(blank(), **words)
            for step in steps:
                ckpt.save(step, state_of(step), metrics={"loss": 1 / step}, block=True)

    return save


@pytest.fixture
def train(tmp_path: Path, memory: Path) -> Iterator[Callable[[Cli], Trainer]]:
    """``train(cli)``: a trainer that lives in a process of its own, killed at the end."""
    with trainers(Place(tmp_path, memory)) as start:
        yield lambda cli: start()
