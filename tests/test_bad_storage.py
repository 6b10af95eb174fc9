"""Tiers that cannot be used, fail or are unreachable: training continues, the log reports them, no committed
checkpoint is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.media import Medium
from tests.steps import state_of, steps_on, wait_until
from tierfall.core.types.errors import (
    FlushError,
)

MakeConfig = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("impatient")


# A medium that fails -----------------------------------------------------------------------------


def test_a_failed_fsync_writes_the_copy_anew(
    make_config: MakeConfig,
    tmp_path: Path,
    slow_medium: Medium,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pages of a failed fsync may be gone and clean: nothing of that file is ever used."""
    with tierfall.open(make_config(disk={}, slow={})) as ckpt:
        slow_medium.fail("fsync", errno.EIO, times=1)
        handle = ckpt.save(1, state_of(1), block=True)
        assert handle.outcome == "saved"
        assert ckpt.statistics().flush_failures["slow"] == 1
    assert len(slow_medium.struck) == 1
    assert slow_medium.struck[0] not in slow_medium.passed
    assert len(slow_medium.passed) == 3  # another image, its manifest, the commit record
    assert "flush of 1@1 to slow failed (try 1)" in caplog.text
    assert steps_on(tmp_path / "slow") == [1]


def test_on_error_raise_reaches_a_loop_that_saves_no_more(
    make_config: MakeConfig, tmp_path: Path, slow_medium: Medium
) -> None:
    config = make_config(disk={}, slow={}, max_wait="0.3s", on_error="raise")
    ckpt = tierfall.open(config)
    slow_medium.fail("fsync", errno.EIO, times=10**9)
    handle = ckpt.save(1, state_of(1))
    wait_until(lambda: handle.exception() is not None, "it is reported")
    with pytest.raises(FlushError, match="flush of 1@1 to slow"):
        ckpt.close()
    assert steps_on(tmp_path / "disk") == [1]
