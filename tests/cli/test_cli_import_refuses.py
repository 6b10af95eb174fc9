"""``import`` says what a path is that it does not take, and what to do: parts of a checkpoint, and odd files."""

from __future__ import annotations

import gzip
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_kit import Cli

from tests.contract.foreign import save_dcp
from tests.steps import files_below

MakeCli = Callable[..., Cli]


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


# Parts of a checkpoint -------------------------------------------------------------------------------


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
        for at in range(0, min(len(whole), 900), 173):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
            step += 1
            answer = cli("import", str(named), "--as-step", str(step), "--run", "r", code=-1)
            assert answer.code == 0 or str(named) in answer.err, answer.err
        file.write_bytes(whole)
