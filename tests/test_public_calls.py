"""A program may have closed its stderr, have no temporary folder, or be raising an exception when the run is closed."""

from __future__ import annotations

import io
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, state_of, step_in, steps_on
from tierfall.errors import ConfigError, TierfallError
from tierfall.run import group_commands

MakeConfig = Callable[..., dict[str, Any]]


# Logging, and folders that are not needed -----------------------------------------------------------------


def test_a_program_may_have_closed_its_stderr(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    logger = logging.getLogger("tierfall")
    monkeypatch.setattr(logger, "propagate", False)  # no handler is configured
    monkeypatch.setattr(sys, "stderr", closed)
    with tierfall.open(make_config(disk={})) as ckpt:
        ckpt.save(1, state_of(1))


def test_a_run_needs_no_temporary_folder(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root, where /dev/shm and the tier's volume are writable."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    for folder in (None, str(tmp_path / "memory")):
        config = make_config(host={} if folder is None else {"folder": folder})
        with tierfall.open(config, fresh=True) as ckpt:
            ckpt.save(1, state_of(1), block=True)
    monkeypatch.setattr("tierfall.tiers.host_folder.SHARED_MEMORY", tmp_path / "none")
    config["tiers"][0].pop("folder")
    with pytest.raises(ConfigError, match="set the host tier's `folder`"):
        tierfall.open(config)


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
