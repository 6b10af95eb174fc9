"""Host memory that cannot be looked at, such as another user's: the other tiers are read, and the commands say so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_kit import Cli

import tierfall
from tierfall.errors import RestoreError


def test_host_memory_that_cannot_be_listed_is_a_tier_that_could_not_be_read(
    make_cli: Callable[..., Cli],
) -> None:
    cli = make_cli(disk={})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, block=True)
    unusable = str(cli.folder / ("m" * 300))  # also for root, whom no mode keeps out
    host, *others = cli.config["tiers"]
    cli.configure({**cli.config, "tiers": [{**host, "folder": unusable}, *others]})

    exported = cli.folder / "step.pt"
    for words, shown in (
        (("ls",), "1@1"),
        (("latest",), "1@1"),
        (("verify",), "good"),
        (("export", "1", "--to", str(exported)), "exported"),
        (("runs",), "1 run"),
        (("check",), "disk"),
    ):
        answer = cli(*words, code=1)
        assert shown in answer.out, words
        assert unusable in answer.err + answer.out, words
    assert exported.exists()

    with pytest.raises(RestoreError, match="tier host could not be read"):
        tierfall.load(cli.config)
    assert tierfall.load(cli.config, step=1)["w"].sum() == 2


def test_what_is_not_seen_of_other_users_is_not_called_nothing(
    make_cli: Callable[..., Cli], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default folder is that of one user; a folder that the file names is looked at whosever it is."""
    monkeypatch.setattr("tierfall.tiers.host_folder.SHARED_MEMORY", tmp_path)
    cli = make_cli(disk={})
    host, *others = cli.config["tiers"]
    for folder, whose in ((host["folder"], ""), (None, " of this user")):
        cli.configure({**cli.config, "tiers": [{**host, "folder": folder}, *others]})
        assert cli("drain").out == f"run run: nothing is in host memory{whose}\n"
        assert f"no checkpoint on the tiers or in host memory{whose}\n" in cli("ls").out
        assert cli("drain", "--all").out == "nothing of this user is in this node's memory\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.parametrize("given", ["*.image", "*.lock"])
def test_root_is_told_to_act_as_the_user_whose_memory_it_is(
    make_cli: Callable[..., Cli], memory: Path, given: str
) -> None:
    """Not to remove it: it may hold the only copy of a step."""
    cli = make_cli(disk={"flush": {"every": 9}})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}).captured()
    (file,) = memory.rglob(given)
    os.chown(file, 12345, -1)
    refused = cli("drain", code=-1).err
    assert "run this as that user" in refused
    assert "remove" not in refused
    held = next(
        line for line in cli("runs", code=-1).out.splitlines()[-2:] if line.startswith("run ")
    )
    assert held.split()[1] == ("?" if given == "*.image" else "1"), "the number of its steps"
