"""Invalid arguments: states, steps, metrics, targets of a restore, and a Checkpointer used where it cannot be."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, state_of, step_in, steps_on
from tierfall.core.types.errors import (
    TierfallError,
)
from tierfall.run import group_commands

MakeConfig = Callable[..., dict[str, Any]]


def in_a_child(action: Callable[[], None]) -> str:
    """Run in a forked child; return what it raised, as ``Kind: message``, or an empty text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is the point
        child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent compares it
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        output = pipe.read().decode()
    os.waitpid(child, 0)
    return output


# Exceptions in the block -------------------------------------------------------------------------


class LoopFailed(Exception):
    pass


def test_a_failing_close_is_noted_on_the_exception_on_its_way(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise TierfallError("the disk is on fire")

    def loop() -> None:
        with tierfall.open(make_config()) as ckpt:
            ckpt.save(1, state_of(1), block=True)
            raise LoopFailed("loss is nan")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(group_commands, "drain_here", refuse)
        with pytest.raises(LoopFailed) as caught:
            loop()
    assert any("closing failed too: the disk is on fire" in n for n in caught.value.__notes__)
    assert "closing failed while another exception was being raised" in caplog.text
    assert steps_on(tmp_path / "disk") == [1]
    with tierfall.open(make_config()) as again:  # the lock was given back
        state = blank()
        again.restore(state)
        assert step_in(state) == 1
