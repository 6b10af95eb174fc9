"""An exported file that is damaged, or that another program has written since, is no longer taken for the step."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
from cli_kit import Cli

import tierfall

MakeCli = Callable[..., Cli]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def test_a_structure_that_does_not_fit_its_file_is_damage(make_cli: MakeCli) -> None:
    """What a file carries for the import is not trusted more than the rest of it."""
    cli = make_cli(disk={})
    with tierfall.open(cli.config) as ckpt:
        state = {"model": torch.nn.Linear(3, 2), "bytes": bytes(range(256)), "rng": None}
        ckpt.save(1, state, block=True)
    path = cli.folder / "step.pt"
    cli("export", "1", "--to", str(path), "--only", "model", "--only", "bytes")
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("tierfall.safetensors"))
        members = {n: archive.read(n) for n in archive.namelist()}
    whole = members[name]
    (length,) = struct.unpack("<Q", whole[:8])
    table = json.loads(whole[8 : 8 + length])

    def changed(places: Any) -> bytes:
        values = json.loads(table["__metadata__"]["tierfall.values"])
        values[-1] = places
        table["__metadata__"]["tierfall.values"] = json.dumps(values)
        text = json.dumps(table).encode().ljust(length)
        return whole[:8] + text[:length] + whole[8 + length :]

    count = len(json.loads(table["__metadata__"]["tierfall.values"])[-1])
    for wrong in (
        whole[: len(whole) // 2],
        b"",
        struct.pack("<Q", 1 << 62) + whole[8:],
        changed(["0"] * count),
        changed([]),
        changed({}),
        changed([["../../etc/passwd"]] * count),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, wrong if member == name else data)
        answer = cli("import", str(path), "--as-step", "5", "--run", "back", code=1)
        assert str(path) in answer.err
        assert "Traceback" not in answer.err


def test_a_folder_that_another_program_has_saved_into_is_what_that_saved(
    make_cli: MakeCli,
) -> None:
    """Nothing of the exported step comes beside the newer values, whole step or part."""
    cli = make_cli(disk={})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, {"weights": {"w": torch.ones(2)}, "epoch": 1}, block=True)
    for step, words in ((5, ()), (6, ("--only", "weights", "--only", "epoch"))):
        folder = cli.folder / f"{step}"
        cli("export", "1", "--to", str(folder), "--format", "dcp", *words)
        torch.distributed.checkpoint.save(
            {"weights": {"w": torch.zeros(2)}, "epoch": 9}, checkpoint_id=folder, no_dist=True
        )
        answer = cli("import", str(folder), "--as-step", str(step), "--run", "back")
        assert "another program has saved into this folder" in answer.out
        found = tierfall.load({**cli.config, "run": "back"})
        assert found["epoch"] == 9
        assert found["weights"]["w"].tolist() == [0, 0]


def test_tensors_of_an_export_are_not_swapped_after_another_program_wrote_it(
    make_cli: MakeCli,
) -> None:
    """safetensors may order tensors anew, and keep the metadata, which has them by their places."""
    cli = make_cli(disk={})
    state = {"a": np.arange(4, dtype=np.int32), "b": torch.full((4,), 2.0)}
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, {"pair": state}, block=True)
    path = cli.folder / "step.safetensors"
    cli("export", "1", "--to", str(path))
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    found = safetensors.torch.load_file(path)
    safetensors.torch.save_file(found, path, metadata=metadata)
    answer = cli("import", str(path), "--as-step", "5", "--run", "back", code=1)
    assert "another program has changed the file" in answer.err
    safetensors.torch.save_file(found, path)
    cli("import", str(path), "--as-step", "5", "--run", "back")
    back = tierfall.load({**cli.config, "run": "back"})
    assert torch.equal(back["model"]["pair.b"], state["b"])
