"""Public calls: errors end at the user's line, a signal handler may make them, and a Checkpointer that no variable
holds can be closed. What a logging handler does holds up no training."""

from __future__ import annotations

import io
import logging
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.steps import refuse_threads, state_of
from tierfall.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    TierfallError,
)
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

MakeConfig = Callable[..., dict[str, Any]]


# Errors -----------------------------------------------------------------------------------------------


def raised(call: Callable[[], object]) -> TierfallError:
    with pytest.raises(TierfallError) as caught:
        call()
    return caught.value


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def frames(error: BaseException) -> list[str]:
    """Return the files of a traceback below this one."""
    return [f.filename for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]


class Mine:
    """An object whose methods fail, as a user's may."""

    def state_dict(self) -> dict[str, int]:
        raise ZeroDivisionError("of the user")

    def load_state_dict(self, state: object) -> None:
        raise ZeroDivisionError("of the user")


def test_the_limit_of_processes_is_an_error_that_names_it_at_the_users_line(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "tierfall-run-status")
    error = raised(lambda: tierfall.open(make_config()))
    assert isinstance(error, CapacityError)
    assert re.match("open: .* another thread.*ulimit -u", str(error))
    assert len(frames(error)) == 1, printed(error)
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    assert isinstance(error.__context__, RuntimeError)


def test_a_wrong_argument_is_an_error_of_tierfall_that_says_what_was_expected(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    two, state = torch.tensor([1, 2]), state_of(1)
    ckpt = tierfall.open(make_config())
    ckpt.save(1, state, block=True)
    anything: Any = ckpt
    no_folder = {**make_config(disk={"path": "/dev/null/folder"}), "run": "other"}
    nothing: Any = None
    five: Any = 5
    calls: list[tuple[str, Callable[[], object]]] = [
        ("save: step must be an integer", lambda: anything.save(two, state)),
        ("save: step must be an integer", lambda: anything.maybe_save(two, state)),
        ("restore: step must be an integer", lambda: anything.restore(state, step=two)),
        ("save: tags must be a list of names", lambda: anything.save(2, state, tags=None)),
        ("save: tags must be a list of names", lambda: TierWriter(ckpt, step=2, tags=nothing)),
        ("restore: only must be a list", lambda: anything.restore(state, only=5)),
        ("restore: only must be a list", lambda: anything.restore(state, only=iter(["model"]))),
        ("restore: skip must be a list", lambda: anything.restore(state, skip=5)),
        ("restore: retype must be a list", lambda: anything.restore(state, retype=5)),
        ("restore: resize must be a list", lambda: anything.restore(state, resize=5)),
        ("load: only must be a list", lambda: anything.load(only=5)),
        ("load: only must be a list", lambda: tierfall.load(tmp_path, only=five)),
        ("load: checkpoint 1@1 has no entry named 'x'", lambda: ckpt.load(only=["x"])),
        ("load: resume is None; expected True", lambda: anything.load(resume=None)),
        ("https://x is an address", lambda: tierfall.open("https://x")),
        ("check the tier's folder", lambda: tierfall.open(no_folder)),
        ("read_pointer: folder must be a path", lambda: tierfall.read_pointer(nothing)),
        ("write_pointer: folder must be a path", lambda: anything.write_pointer(5, 1)),
        ("expected a Checkpointer", lambda: TierWriter(nothing, step=1)),
        ("expected a Checkpointer", lambda: TierReader(nothing)),
        ("expected a Checkpointer", lambda: LazyStager(nothing)),
        ("LazyStager captures for a TierWriter", lambda: LazyStager(ckpt).stage({})),
        ("None is not a type", lambda: tierfall.register_codec(nothing, "x", str, str)),
    ]
    for expected, call in calls:
        error = raised(call)
        assert expected in str(error)
        assert len(frames(error)) == 1, printed(error)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepp'") as caught:
        anything.restore(state, stepp=1)
    assert not frames(caught.value)
    ckpt.close()
    guard = ckpt.guard()
    assert len(frames(raised(guard.__enter__))) == 1


def test_an_error_of_the_users_code_keeps_its_traceback(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        error = raised(lambda: ckpt.save(1, {"mine": Mine()}))
        assert isinstance(error, CaptureError)
        assert len(frames(error)) == 1
        for words in ("in state_dict", "raise ZeroDivisionError", "ZeroDivisionError: of the user"):
            assert words in printed(error)
        assert isinstance(error.__cause__, ZeroDivisionError)


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
