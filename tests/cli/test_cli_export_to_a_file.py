"""``export --to NAME.pt`` and ``--to NAME.safetensors`` write that file; its ending is the format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from cli_kit import Cli

from tests.steps import files_below, state_of

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
READ: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".pt": lambda path: {"w": torch.load(path, weights_only=True)},
    ".safetensors": safetensors.torch.load_file,
}


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved) -> Cli:
    cli = make_cli(disk={})
    saved(cli, [1])
    return cli


@pytest.mark.parametrize("ending", READ)
@pytest.mark.parametrize("named", [False, True])
def test_the_file_is_written_under_its_name(
    cli: Cli, tmp_path: Path, ending: str, named: bool
) -> None:
    path = tmp_path / "deep" / f"mine{ending}"
    words = ["export", "1", "--to", str(path), "--only", "w"]
    if named:
        words += ["--format", {".pt": "torch"}.get(ending, "safetensors")]
    assert cli.json(*words)["path"] == str(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert torch.equal(READ[ending](path)["w"], state_of(1)["w"])
    whole = tmp_path / f"whole{ending}"
    assert cli.json("export", "1", "--to", str(whole))["path"] == str(whole)
    assert whole.is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.pt", ["--format", "safetensors"]),
        ("x.pt", ["--format", "dcp"]),
        ("x.safetensors", ["--format", "torch"]),
        ("x.safetensors", ["--max-shard", "5GB", "--only", "w"]),
        ("x.pt", ["--dtype", "bf16", "--only", "w"]),
    ],
)
def test_what_contradicts_the_ending_is_refused(
    cli: Cli, tmp_path: Path, name: str, words: list[str]
) -> None:
    before = files_below(tmp_path)
    answer = cli("export", "1", "--to", str(tmp_path / name), *words, code=2)
    assert words[0] in answer.err
    assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before
