"""What ``export`` writes, ``import`` brings back exactly: a whole step in each format, and parts of it."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
from cli_kit import Cli

import tierfall
from tests.rank_kit import config_of, save_on_ranks
from tierfall.cli import app  # noqa: F401 - the commands' modules are in place before the random state is compared

MakeCli = Callable[..., Cli]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]
FORMS = {"torch": "step.pt", "safetensors": "step.safetensors", "dcp": "step"}
MX = [n for n in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, n)]


@dataclass
class Progress:
    """A class of the program."""

    epoch: int
    best: Decimal


class Language(torch.nn.Module):
    """Tied weights, a convolution in another memory layout, and buffers of small dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        for name in (*MX, "float8_e4m3fn", "uint16", "complex64"):
            value = torch.arange(1, 33, dtype=torch.uint8).view(getattr(torch, name))
            self.register_buffer(name, value)


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Language()
    decay = [model.head.weight, model.conv.weight]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": [model.conv.bias], "lr": 0.5}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    (
        model.head(model.embedding(torch.arange(8))).sum()
        + model.conv(torch.ones(1, 3, 4, 4)).sum()
    ).backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def values() -> dict[str, Any]:
    """What files of other programs do not tell apart, or what needs a class."""
    shared = torch.arange(6.0)
    return {
        "average": OrderedDict(w=shared, v=shared),
        "tensors": {3: torch.ones(2), "deep": [torch.zeros(0, 4), (torch.tensor(2), "text")]},
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
        "double": torch.ones(3, dtype=torch.complex128),
        "array": np.arange(5, dtype=np.int16),
        "losses": deque([0.5, float("nan")], maxlen=9),
        "progress": Progress(3, Decimal("0.25")),
        "bytes": bytes(range(256)) * 300,
        "none": None,
        "empty": {},
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if one.is_quantized:
            assert (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
            one, other = one.int_repr(), other.int_repr()
        assert bytes(one.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
            other.contiguous().view(-1).view(torch.uint8).numpy()
        )
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert repr(one) == repr(other)


@pytest.fixture
def cli(make_cli: MakeCli) -> Cli:
    """Step 1 of all of this, in the run ``run``."""
    cli = make_cli(disk={})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, {**objects(1), **values()}, block=True)
    return cli


def loaded(cli: Cli, run: str) -> Any:
    return tierfall.load({**cli.config, "run": run})


def bring_back(cli: Cli, form: str, *words: str, run: str = "back") -> dict[str, Any]:
    """Export step 1 in a format, import it into another run, and return what the import says."""
    path = str(cli.folder / FORMS[form])
    cli("export", "1", "--to", path, "--format", form, *words)
    return cli.json("import", path, "--as-step", "5", "--run", run)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_several_ranks_comes_back_as_one(
    tmp_path: Path, make_cli: MakeCli, form: str
) -> None:
    config = config_of(tmp_path)

    def state(rank: int, step: int) -> dict[str, Any]:
        more = {
            "seen": 100 + rank,
            "array": np.arange(4) + rank,
            "running": torch.full((3,), float(rank)),
        }
        return {**objects(1), **more, f"stage{rank}": {"w": torch.full((5, 7), float(rank))}}

    save_on_ranks(config, 2, [1], state)
    cli = make_cli(disk={})
    cli.configure(json.loads(config.model_dump_json(exclude_unset=True)))
    document = bring_back(cli, form)
    assert "per_rank" in document["entries"]
    before, after = tierfall.load(config), loaded(cli, "back")
    own = after.pop("per_rank")
    assert_same(after, before)
    assert own["1"]["seen"] == 101
    assert own["1"]["array"].tolist() == [1, 2, 3, 4]
    other = {**objects(2), "seen": 0, "array": np.zeros(4), "running": torch.zeros(3)}
    with tierfall.open(cli.config, run="back") as ckpt:
        report = ckpt.restore(other, only=list(other))
    assert report is not None
    assert other["seen"] == 100


def test_a_structure_that_does_not_fit_its_file_is_damage(cli: Cli) -> None:
    """What a file carries for the import is not trusted more than the rest of it."""
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
        found = loaded(cli, "back")
        assert found["epoch"] == 9
        assert_same(found["weights"]["w"], torch.zeros(2))


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
    assert_same(loaded(cli, "back")["model"]["pair.b"], state["b"])
