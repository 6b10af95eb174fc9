"""``export`` and ``copy``: their output, in words and as a document, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

from tests.contract.kit import IMAGE
from tierfall.cli import commands

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved) -> Cli:
    """Steps 1 and 2 on disk, and step 2 on far."""
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, [1, 2])
    return cli


# export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [("commit.json", IMAGE), (IMAGE,)])
def test_a_step_that_is_dropped_while_it_is_exported_is_not_called_damaged(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...]
) -> None:
    """The commit record is the first to go. An image that is missing beside it is damage."""
    real = commands.export_checkpoint

    def drop_first(*words: Any) -> Any:
        for name in gone:
            (tmp_path / "disk/run/step-00000001-a0001" / name).unlink()
        return real(*words)

    monkeypatch.setattr(commands, "export_checkpoint", drop_first)
    err = cli("export", "1", "--to", str(tmp_path / "out"), code=1).err
    if len(gone) == 2:
        assert err == "tierfall: export: 1@1 was deleted while it was read\n"
    else:
        assert "damaged in every copy" in err
