"""Ctrl-C at any moment: what it cut short is lost or whole, and whatever comes next works as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests import forked
from tests.crash import interrupted

MakeConfig = Callable[..., dict[str, Any]]


def run(config: dict[str, Any], seconds: float, seed: int) -> int:
    command = [interrupted.__file__, str(seconds), str(seed), json.dumps(config)]
    done = forked.run(command, timeout=seconds + 120)
    assert done.returncode == 0, done.stderr[-6000:]
    return int(done.stdout)


def config_of(make_config: MakeConfig) -> dict[str, Any]:
    return make_config(disk={"retain": {"last": 3}}, host={"capacity": "64MiB"}, max_wait="10s")


def test_a_save_after_an_interrupt_arrives(make_config: MakeConfig) -> None:
    assert run(config_of(make_config), 1.5, 1) > 3


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_interrupts_break_nothing(make_config: MakeConfig, seed: int) -> None:
    assert run(config_of(make_config), 30.0, 100 + seed) > 100
