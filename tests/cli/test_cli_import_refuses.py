"""``import`` says what a path is that it does not take, and what to do: parts of a checkpoint, and odd files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import socket
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from cli_kit import Cli

from tests.steps import files_below

MakeCli = Callable[..., Cli]
SHARDS = tuple(f"-0000{n}-of-00002" for n in (1, 2))


@pytest.fixture
def cli(make_cli: MakeCli, tmp_path: Path) -> Cli:
    (tmp_path / "disk").mkdir()
    return make_cli(disk={})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def refused(cli: Cli, path: Path) -> str:
    """Import a path, which fails and changes nothing, and return the one line that says why."""
    before = files_below(cli.folder / "disk")
    answer = cli("import", str(path), "--as-step", "5", code=-1)
    assert answer.code in (1, 2), f"{path} was imported"
    assert (answer.out, answer.err.count("\n")) == ("", 1), answer.err
    assert str(path) in answer.err or str(path.parent) in answer.err
    assert files_below(cli.folder / "disk") == before
    return answer.err


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


# Parts of a checkpoint -------------------------------------------------------------------------------


def test_a_shard_of_safetensors_needs_its_index(cli: Cli, place: Path) -> None:
    names = [f"model{shard}.safetensors" for shard in SHARDS]
    for number, name in enumerate(names):
        safetensors.torch.save_file({f"w{number}": torch.ones(2)}, place / name)
    for path in (place, place / names[1]):
        err = refused(cli, path)
        assert "is a shard of a model: import the index" in err
        assert "name one of them" not in err
    where = {f"w{number}": name for number, name in enumerate(names)}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert "import the index" in refused(cli, place / names[1])
    cli("import", str(place), "--as-step", "5")
    only = place / "other-00001-of-00001.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, only)
    cli("import", str(only), "--as-step", "6")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "zero_to_fp32.py . OUT --safe_serialization",
        ),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "docs/deepspeed.md"),
        (["zero_to_fp32.py", "latest"], "DeepSpeed"),
        (["model_optim_rng.pt"], "AutoBridge.export_ckpt"),
        (["latest_checkpointed_iteration.txt"], "Megatron"),
        (["consolidated.00.pth", "consolidated.01.pth"], "convert_llama_weights_to_hf.py"),
        (["__0_0.distcp"], "import the folder, with .metadata in it"),
        (["rank-00000-of-00002.safetensors", "commit.json"], "tierfall export"),
    ],
)
def test_parts_of_other_systems_name_what_makes_a_whole_of_them(
    cli: Cli, place: Path, files: list[str], says: str
) -> None:
    for name in files:
        torch.save({"w": torch.ones(2)}, place / name)
    assert says in refused(cli, place)
    assert says in refused(cli, place / files[0])


def test_a_part_that_has_another_name_is_known_by_its_content(cli: Cli, place: Path) -> None:
    torch.save({"module": {"w": torch.ones(2)}, "ds_version": "0.17.0"}, place / "model.pt")
    assert "zero_to_fp32.py" in refused(cli, place / "model.pt")


@pytest.mark.parametrize(
    ("beside", "says"), [("common.pt", "Megatron"), ("meta.pt", "consolidate_checkpoint")]
)
def test_a_dcp_folder_with_a_part_beside_it_is_not_the_whole(
    cli: Cli, place: Path, beside: str, says: str
) -> None:
    save_dcp(place, {"w": torch.ones(2)})
    cli("import", str(place / ".metadata"), "--as-step", "1")  # whoever names DCP's part gets it
    torch.save({"iteration": 100}, place / beside)
    assert says in refused(cli, place)
    assert says in refused(cli, place / beside)


def test_a_file_of_such_a_name_alone_is_a_file(cli: Cli, place: Path) -> None:
    for number, name in enumerate(("common.pt", "meta.pt", "consolidated.00.pth")):
        torch.save({"w": torch.ones(2)}, place / name)
        cli("import", str(place / name), "--as-step", str(number))


# Odd files -------------------------------------------------------------------------------------------


def test_what_is_no_file_is_named_and_not_waited_for(cli: Cli, place: Path) -> None:
    os.mkfifo(place / "pipe.pt")
    assert "is a named pipe, not a file" in refused(cli, place / "pipe.pt")
    assert "holds no checkpoint" in refused(cli, place)
    for device in ("/dev/zero", "/dev/null"):
        assert "is a device, not a file" in refused(cli, Path(device))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "s"))
        assert "is a socket, not a file" in refused(cli, place / "s")
    (place / "x.pt").mkdir()
    assert "holds no checkpoint" in refused(cli, place / "x.pt")
    (place / "loop").symlink_to("loop")
    assert "cannot be read" in refused(cli, place / "loop")
    folder = save_dcp(place / "dcp", {"w": torch.ones(2)})
    (data,) = folder.glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    assert "is a named pipe, not a file" in refused(cli, folder)


def test_what_another_program_wrote_is_named(cli: Cli, place: Path) -> None:
    path = place / "file.bin"
    for content, says in (
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"GGUF\x03\x00\x00\x00more", "is a GGUF file"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (gzip.compress(b"text"), "is compressed by gzip"),
        (b"<!DOCTYPE html>", "is a page of HTML"),
        (pickle.dumps({"a": 1}), "is a pickle, which torch.save did not write"),
    ):
        path.write_bytes(content)
        assert says in refused(cli, path)
    np.savez(place / "a.npz", a=np.ones(2))
    assert "is a zip file that torch.save did not write" in refused(cli, place / "a.npz")
    with zipfile.ZipFile(place / "script.pt", "w") as archive:  # as torch.jit.save has them
        for name in ("data.pkl", "code/__torch__.py", "constants.pkl", "version"):
            archive.writestr(f"script/{name}", b"")
    assert "is a TorchScript module" in refused(cli, place / "script.pt")


def test_a_bit_that_flips_in_a_pickle_is_no_traceback(cli: Cli, place: Path) -> None:
    """Whatever the library makes of the bytes, the message names the file."""
    folder = save_dcp(place / "dcp", {"m": torch.arange(10.0), "n": {"a": [1, "text"]}})
    torch.save({"m": torch.arange(10.0)}, place / "z.pt")
    torch.save({"m": torch.arange(10.0)}, place / "l.pt", _use_new_zipfile_serialization=False)
    (data,) = folder.glob("*.distcp")
    step = 0
    for named, file in (
        (folder, folder / ".metadata"),
        (folder, data),
        (place / "z.pt", place / "z.pt"),
        (place / "l.pt", place / "l.pt"),
    ):
        whole = file.read_bytes()
        for at in range(0, min(len(whole), 900), 31):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
            step += 1
            answer = cli("import", str(named), "--as-step", str(step), "--run", "r", code=-1)
            assert answer.code == 0 or str(named) in answer.err, answer.err
        file.write_bytes(whole)


def test_a_truncated_zip_is_damage(cli: Cli, place: Path) -> None:
    torch.save({"w": torch.ones(1000)}, place / "c.pt")
    whole = (place / "c.pt").read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 30):
        (place / "c.pt").write_bytes(whole[:length])
        assert "is damaged, or truncated" in refused(cli, place / "c.pt")
    with zipfile.ZipFile(place / "c.pt", "w"):
        pass
    assert str(place / "c.pt") in refused(cli, place / "c.pt")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.pt",
        "dcp/.metadata",
        "dcp/__0_0.distcp",
        "m.safetensors.index.json",
    ],
)
def test_what_may_not_be_read_is_not_called_damaged(
    cli: Cli, place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, place / "model.safetensors")
    torch.save({"w": torch.ones(2)}, place / "model.pt")
    save_dcp(place / "dcp", {"w": torch.ones(2), "n": 1})
    where = {"weight_map": {"w": "model.safetensors"}}
    (place / "m.safetensors.index.json").write_text(json.dumps(where))
    path = place / name
    path.chmod(0)
    if os.geteuid() == 0:  # root reads all: the system refuses in its place
        forbid(path, monkeypatch)
    err = refused(cli, path.parent if "dcp" in name else path)
    assert "cannot be read: Permission denied" in err
    assert "damaged" not in err


def forbid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each opening of a path fail, as for another user."""
    import builtins
    import io

    for module in (builtins, io):
        real = module.open

        def guarded(file: Any, *words: Any, real: Any = real, **more: Any) -> Any:
            if not isinstance(file, int) and Path(os.fspath(file)) == path:
                raise PermissionError(13, "Permission denied", str(path))
            return real(file, *words, **more)

        monkeypatch.setattr(module, "open", guarded)
