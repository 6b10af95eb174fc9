"""Ctrl-C at any moment: what it cut short is lost or whole, and whatever comes next works as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests import forked
from tests.crash import interrupted

MakeConfig = Callable[..., dict[str, Any]]


def run(config: dict[str, Any], times: int, seed: int) -> None:
    """Interrupt a trainer so often."""
    command = [interrupted.__file__, str(times), str(seed), json.dumps(config)]
    done = forked.run(command, timeout=times + 120)
    assert done.returncode == 0, done.stderr[-6000:]


def config_of(make_config: MakeConfig) -> dict[str, Any]:
    return make_config(disk={"retain": {"last": 3}}, host={"capacity": "64MiB"}, max_wait="10s")


def test_a_save_after_an_interrupt_arrives(make_config: MakeConfig) -> None:
    run(config_of(make_config), 8, 1)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_interrupts_break_nothing(make_config: MakeConfig, seed: int) -> None:
    run(config_of(make_config), 200, 100 + seed)
