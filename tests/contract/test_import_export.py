"""``tierfall import`` of what other programs wrote, ``tierfall export`` for other programs, and back exactly."""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import tierfall
from tests.contract.foreign import hub, save_dcp
from tests.contract.kit import (
    IMAGE,
    Place,
    equal,
    files_below,
    flip,
    folder_of,
    new_place,
    wait_until,
)
from tests.contract.trainer import save

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def trained(seed: int = 0, steps: int = 1) -> dict[str, Any]:
    """A model, its optimizer and its scheduler after so many steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        model(torch.randn(5, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the objects of two trainings have the same values bit for bit."""
    pairs = [(one[name].state_dict(), other[name].state_dict()) for name in one]
    return all(equal(_plain(a), _plain(b)) for a, b in pairs)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def bring(place: Place, path: Path | str, *words: str, step: int = 5) -> dict[str, Any]:
    """Import a path; return the document."""
    return place.json("import", str(path), "--as-step", str(step), *words)


def refused(place: Place, path: Path | str, *words: str, code: int = -1) -> str:
    """What refuses an import; nothing is saved."""
    before = files_below(place.root / "disk")
    answer = place.cli("import", str(path), "--as-step", "5", *words, code=code)
    assert answer.code in (1, 2), answer.out
    assert answer.out == ""
    assert answer.err.startswith("tierfall: ")
    assert "Traceback" not in answer.err
    assert {n for n in files_below(place.root / "disk") if n.endswith(".safetensors")} == {
        n for n in before if n.endswith(".safetensors")
    }
    return answer.err


def restored(place: Place, state: dict[str, Any], **how: Any) -> dict[str, Any]:
    with place.open() as ckpt:
        assert ckpt.restore(state, **how) is not None
    return state


# Import: formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_of_a_whole_training_continues_it(place: Place, legacy: bool) -> None:
    place.config(disk={}, far={"flush": {"every": 100}})
    old = trained()
    state = {name: part.state_dict() for name, part in old.items()}
    path = place.root / "old.pt"
    torch.save({**state, "epoch": 3}, path, _use_new_zipfile_serialization=not legacy)
    done = bring(place, path)
    assert done["ok"]
    assert (done["step"], done["format"]) == (5, "torch")
    assert done["entries"] == ["model", "optimizer", "scheduler", "epoch"]
    assert place.ls() == {"5@1": {"disk": "committed", "far": "committed"}}
    found = {**trained(1, 0), "epoch": 0}
    restored(place, found)
    assert (found.pop("epoch"), same(found, old)) == (3, True)


def test_a_bare_state_dict_is_the_model_or_the_entry_that_is_named(place: Place) -> None:
    place.config()
    old = trained()
    torch.save(old["model"].state_dict(), place.root / "model.pth")
    assert bring(place, place.root / "model.pth")["entries"] == ["model"]
    bring(place, place.root / "model.pth", "--entry", "teacher", step=6)
    found = {"teacher": trained(1, 0)["model"]}
    restored(place, found, only=["teacher"])
    assert same(found, {"teacher": old["model"]})
    counted = Counted()
    counted.seen = 3
    torch.save(counted.state_dict(), place.root / "counted.pth")
    bring(place, place.root / "counted.pth", step=7)
    assert restored(place, {"model": Counted()}, only=["model"])["model"].seen == 3


class Counted(nn.Linear):
    """With a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight


def test_a_hugging_face_folder_restores_into_a_model_with_tied_weights(place: Place) -> None:
    """The folder leaves the tied head out."""
    place.config()
    model, other = Tied(), Tied()
    tensors = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    folder = hub(place.root / "hub", tensors)
    (folder / "config.json").write_text("{}")
    done = bring(place, folder)
    assert (done["format"], done["entries"]) == ("safetensors", ["model"])
    restored(place, {"model": other})
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert other.lm_head.weight is other.embed.weight
    assert "index" in refused(place, folder / "model-00002-of-00002.safetensors")


def test_dtypes_and_shapes_of_a_safetensors_file_stay(place: Place) -> None:
    place.config()
    tensors = {
        "scalar": torch.ones((), dtype=torch.bfloat16),
        "none": torch.ones(0, 3, dtype=torch.float16),
        "odd": torch.ones(3, 5, dtype=torch.uint8),
        "flags": torch.arange(90_000) % 2 == 0,
        "small": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    safetensors.torch.save_file(tensors, place.root / "t.safetensors")
    bring(place, place.root / "t.safetensors")
    loaded = tierfall.load(place.yaml)["model"]
    assert {name: equal(loaded[name], tensors[name]) for name in tensors} == dict.fromkeys(
        tensors, True
    )


def test_a_lightning_file_gets_the_usual_names(place: Place) -> None:
    place.config()
    old = trained()
    weights = {f"net.{name}": tensor for name, tensor in old["model"].state_dict().items()}
    content = {
        "epoch": 2,
        "global_step": 40,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [old["optimizer"].state_dict()],
        "lr_schedulers": [old["scheduler"].state_dict()],
        "hyper_parameters": {"width": 16},
    }
    torch.save(content, place.root / "epoch=2.ckpt")
    bring(place, place.root / "epoch=2.ckpt")
    new = trained(1, 0)
    state = {**new, "model": nn.ModuleDict({"net": new["model"]})}
    restored(place, state, only=list(state))
    assert same(new, old)
    rest = tierfall.load(place.yaml)["lightning"]
    assert (rest["global_step"], rest["hyper_parameters"]) == (40, {"width": 16})


def test_a_dcp_folder_continues_by_the_names_of_its_parameters(place: Place) -> None:
    place.config()
    old = trained()
    model, optimizer = get_state_dict(old["model"], old["optimizer"])
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    done = bring(place, save_dcp(place.root / "dcp", state))
    assert (done["format"], done["entries"]) == ("dcp", ["model", "optimizer", "epoch"])
    new = {**trained(1, 0), "epoch": 0}
    restored(place, new, only=["model", "optimizer", "epoch"])
    assert new["epoch"] == 3
    assert same(
        {k: new[k] for k in ("model", "optimizer")}, {k: old[k] for k in ("model", "optimizer")}
    )
    other = trained(1, 0)["model"]
    moments = type(old["optimizer"])([*other.parameters()][::-1])
    restored(place, {"model": other, "optimizer": moments}, only=["model", "optimizer"])
    for mine, its in zip(old["model"].parameters(), other.parameters(), strict=True):
        assert equal(dict(old["optimizer"].state[mine]), dict(moments.state[its]))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_prefixes_of_wrappers_are_removed_and_a_note_says_so(place: Place) -> None:
    place.config()
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    names = {f"module._orig_mod.{n}": t for n, t in model.state_dict().items()}
    torch.save({"model": names}, place.root / "ddp.pt")
    done = bring(place, place.root / "ddp.pt")
    assert any("module." in note for note in done["notes"])
    restored(place, {"model": other})
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    mine, back = Wrapper(), Wrapper()
    torch.save({"model": mine.state_dict()}, place.root / "own.pt")
    bring(place, place.root / "own.pt", step=6)
    restored(place, {"model": back}, rename={"model": "model.module"})
    assert equal(dict(mine.state_dict()), dict(back.state_dict()))


class Named(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(2, 2, bias=False))


def test_moments_that_match_by_order_alone_are_refused_for_layers_in_another_order(
    place: Place,
) -> None:
    place.config()
    model = Named(["query", "key"])
    optimizer = torch.optim.AdamW(model.parameters())
    (model.query(torch.ones(1, 2)) * 3 + model.key(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place.root / "o")
    bring(place, place.root / "o")
    other = Named(["key", "query"])
    moments = torch.optim.AdamW(other.parameters())
    with (
        place.open() as ckpt,
        pytest.raises(
            tierfall.errors.RestoreError, match=r"(?s)optimizer: .*order.*skip=\['optimizer'\]"
        ),
    ):
        ckpt.restore({"model": other, "optimizer": moments})
    optimizer = torch.optim.AdamW(model.named_parameters())
    model.query(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place.root / "n")
    bring(place, place.root / "n", step=6)
    restored(place, {"model": other, "optimizer": moments})
    for one, named in ((model.query, other.query), (model.key, other.key)):
        expected = optimizer.state[one.weight]["exp_avg"]
        assert equal(moments.state[named.weight]["exp_avg"], expected), "the file has their names"


def test_other_names_of_entries_are_renamed_in_the_first_restore(place: Place) -> None:
    place.config()
    old = trained()
    names = {"model_state_dict": "model", "optimizer_state_dict": "optimizer"}
    torch.save({n: old[part].state_dict() for n, part in names.items()}, place.root / "tutorial.pt")
    bring(place, place.root / "tutorial.pt")
    new = trained(1, 0)
    found = {"model": new["model"], "optimizer": new["optimizer"]}
    restored(place, found, rename=names)
    assert same(found, {name: old[name] for name in found})


# Import: into which run ------------------------------------------------------------------------------------


def test_an_imported_step_continues_the_run_and_needs_a_step_above_all_others(
    place: Place,
) -> None:
    place.config(disk={}, far={})
    torch.save({"w": torch.ones(3)}, place.root / "x.pt")
    text = place.cli("import", "x.pt", "--as-step", "5").out
    assert "created" in text, "before the first training an import creates the folders"
    for step in ("5", "4"):
        answer = place.cli("import", "x.pt", "--as-step", step, code=1)
        assert "5" in answer.err
    bring(place, "x.pt", step=6)
    assert place.ls() == {f"{s}@{a}": {"disk": "committed", "far": "committed"} for s, a in (
        (5, 1), (6, 2))}  # fmt: skip
    (place.root / "far").rename(place.root / "unmounted")
    assert "far" in refused(place, "x.pt")
    assert not (place.root / "far").exists()


def test_a_killed_import_leaves_nothing_that_counts(place: Place) -> None:
    place.config(disk={"bandwidth": "400kB/s"})
    torch.save({"w": torch.ones(1_000_000)}, place.root / "x.pt")
    importing = place.begin("import", "x.pt", "--as-step", "5")
    wait_until(lambda: any((place.root / "disk").rglob("step-*")), "the import has begun")
    importing.kill()
    assert place.json("ls")["checkpoints"] == []
    place.config()
    bring(place, "x.pt")
    assert place.cli("latest").out.startswith("5@")
    with place.open():
        pass
    assert len(list((place.root / "disk" / "run").glob("step-*"))) == 1


# Import: what is refused -----------------------------------------------------------------------------------


class Custom:
    """A class of the program that saved; it would leave a file."""

    def __init__(self, crater: str) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.crater,))


def test_no_code_of_a_file_is_run_and_what_needs_a_class_is_named(place: Place) -> None:
    place.config()
    crater = place.root / "crater"
    for legacy in (False, True):
        path = place.root / f"bomb-{legacy}.pt"
        content = {"w": torch.ones(2), "x": Custom(str(crater))}
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        assert "mkdir" in refused(place, path)
    torch.save({"w": torch.ones(2), "d": Decimal("1.5")}, place.root / "class.pt")
    assert "Decimal" in refused(place, place.root / "class.pt")
    folder = save_dcp(place.root / "dcp", {"w": torch.ones(2)})
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(Custom(str(crater))))
    assert "mkdir" in refused(place, folder)
    assert not crater.exists()


def odd_files(root: Path) -> Iterator[Path]:
    torch.save({"w": torch.ones(1000)}, root / "good.pt")
    data = (root / "good.pt").read_bytes()
    (root / "half.pt").write_bytes(data[: len(data) // 2])
    (root / "empty.pt").write_bytes(b"")
    (root / "text.pt").write_text("no checkpoint at all")
    cyclic: dict[str, Any] = {"t": torch.ones(2)}
    cyclic["self"] = cyclic
    torch.save(cyclic, root / "cyclic.pt")
    deep: dict[str, Any] = {"t": torch.ones(2)}
    for _ in range(400):
        deep = {"d": deep}
    torch.save(deep, root / "deep.pt")
    yield from (root / f"{name}.pt" for name in ("half", "empty", "text", "cyclic", "deep"))
    os.mkfifo(root / "pipe.pt")
    yield root / "pipe.pt"
    with zipfile.ZipFile(root / "zip.pt", "w") as archive:
        archive.writestr("x/y", "z")
    yield root / "zip.pt"
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}})
    (root / "claimed.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    (root / "longer.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    yield from (root / "claimed.safetensors", root / "longer.safetensors")
    outside = root / "outside"
    outside.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, root / "there.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "../there.safetensors"}}
    (outside / "model.safetensors.index.json").write_text(json.dumps(index))
    yield outside
    for name, change in (
        ("zeros", lambda d: bytes(len(d))),
        ("cut", lambda d: d[: len(d) // 2]),
        ("words", lambda d: b"root:x:0:0\n" * (len(d) // 11 + 1)),
    ):
        folder = save_dcp(root / name, {"m": torch.arange(1000.0)})
        (part,) = folder.glob("*.distcp")
        part.write_bytes(change(part.read_bytes()))
        yield folder
    (root / "nothing").mkdir()
    yield root / "nothing"
    yield root / "not there"


def test_odd_and_damaged_files_are_errors_that_name_them(place: Place) -> None:
    place.config()
    for path in odd_files(place.memory):
        err = refused(place, path)
        assert path.name in err or str(path) in err, path
    assert place.json("ls")["checkpoints"] == []


@pytest.mark.parametrize(
    ("files", "cure"),
    [
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            "save_pretrained",
        ),
        (
            ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "zero_to_fp32",
        ),
        (["model_optim_rng.pt"], "AutoBridge.export_ckpt"),
        (["consolidated.00.pth", "consolidated.01.pth"], "convert_llama_weights_to_hf"),
        (["__0_0.distcp"], ".metadata"),
        (["rank-00000-of-00002.safetensors", "commit.json"], "tierfall export"),
    ],
)
def test_a_part_of_a_checkpoint_is_refused_with_what_makes_a_whole_of_it(
    place: Place, files: list[str], cure: str
) -> None:
    place.config()
    folder = place.root / "parts"
    folder.mkdir()
    for name in files:
        torch.save({"w": torch.ones(2)}, folder / name)
    for path in (folder, folder / files[0]):
        err = refused(place, path)
        assert cure in err
        assert "name one of them" not in err


# Export -----------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """A class of the program."""

    epoch: int
    best: Decimal


class Language(nn.Module):
    """Tied weights, a convolution in another memory layout, and buffers of small dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fn", "uint16", "complex64"):
            if hasattr(torch, name):
                value = torch.arange(1, 33, dtype=torch.uint8).view(getattr(torch, name))
                self.register_buffer(name, value)


def whole(seed: int) -> dict[str, Any]:
    """Objects, and values that files of other programs do not tell apart, or that need a class."""
    torch.manual_seed(seed)
    model = Language()
    groups = [{"params": [model.head.weight, model.conv.weight]}, {"params": [model.conv.bias]}]
    optimizer = torch.optim.AdamW(groups)
    out = model.head(model.embedding(torch.arange(8))).sum()
    (out + model.conv(torch.ones(1, 3, 4, 4)).sum()).backward()
    optimizer.step()
    shared = torch.arange(6.0) + seed
    return {
        "model": model,
        "optimizer": optimizer,
        "average": OrderedDict(w=shared, v=shared),
        "tensors": {
            3: torch.ones(2) * seed,
            "deep": [torch.zeros(0, 4), (torch.tensor(seed), "t")],
        },
        "array": np.arange(5, dtype=np.int16) + seed,
        "losses": deque([0.5, -0.0], maxlen=9),
        "nan": float("nan"),
        "progress": Progress(seed, Decimal("0.25")),
        "bytes": bytes(range(256)) * 300,
        "none": None,
    }


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Step 1 of ``whole(1)`` on ``disk`` and ``far``, which the tests only read."""
    with new_place(tmp_path_factory.mktemp("full")) as place:
        place.config(disk={}, far={}, plugins=[__name__])
        with place.open() as ckpt:
            ckpt.save(1, whole(1), block=True)
        yield place


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_a_whole_step_comes_back_exactly_in_another_run(
    full: Place, tmp_path: Path, form: str
) -> None:
    """Random state, classes, strides, ties and small dtypes included."""
    path = tmp_path / {"safetensors": "s.safetensors", "torch": "s.pt", "dcp": "dcp"}[form]
    full.cli("export", "1", "--to", str(path), "--format", form)
    full.cli("import", str(path), "--as-step", "1", "--run", f"back-{form}")
    one, other = (
        {name: value for name, value in tierfall.load(full.yaml, step=1, **how).items()}
        for how in ({}, {})
    )
    with full.open(run=f"back-{form}") as ckpt:
        found = ckpt.load()
        assert found is not None
        back = found[1]
        state = whole(2)
        ckpt.restore(state)
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
    assert list(back) == list(one)
    assert equal(back, one), [name for name in one if not equal(back[name], one[name])]
    assert equal(other, one)
    expected = whole(1)
    assert equal(dict(state["model"].state_dict()), dict(expected["model"].state_dict()))
    assert state["progress"] == expected["progress"]
    assert state["model"].head.weight is state["model"].embedding.weight
    with full.open(run=f"back-{form}") as ckpt:
        ckpt.restore(whole(3))
        assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())


def test_a_model_for_hugging_face_is_a_folder_of_shards_under_all_its_names(
    full: Place, tmp_path: Path
) -> None:
    (full.root / "config.json").write_text("{}")
    folder = tmp_path / "hub"
    words = ["--only", "model", "--max-shard", "2KB", "--dtype", "bf16", "--with", "config.json"]
    full.cli("export", "1", "--to", str(folder), *words)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert (folder / "config.json").exists()
    assert {path.name for path in folder.glob("*.safetensors")} == set(index.values())
    loaded = {}
    for file in sorted(set(index.values())):
        loaded |= safetensors.torch.load_file(folder / file)
    expected = whole(1)["model"].state_dict()
    assert loaded.keys() == expected.keys() == index.keys()
    assert equal(loaded["conv.bias"], expected["conv.bias"].to(torch.bfloat16))
    assert index["head.weight"] == index["embedding.weight"], "tied weights are in one file"
    assert loaded["uint16"].dtype == torch.uint16, "integers are not converted"


def test_each_name_of_a_tied_weight_has_its_values(full: Place, tmp_path: Path) -> None:
    weight = whole(1)["model"].head.weight.detach()
    for name, words in ("float32", []), ("bfloat16", ["--dtype", "bf16"]):
        path = tmp_path / f"{name}.safetensors"
        full.cli("export", "1", "--to", str(path), "--only", "model", *words)
        loaded = safetensors.torch.load_file(path)
        for tied in ("embedding.weight", "head.weight"):
            assert equal(loaded[tied], weight.to(getattr(torch, name))), (name, tied)


def test_small_dtypes_are_those_that_safetensors_has(full: Place, tmp_path: Path) -> None:
    full.cli("export", "1", "--to", str(tmp_path / "m.safetensors"), "--only", "model")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    expected = whole(1)["model"]
    for name, value in expected.named_buffers():
        probe = tmp_path / "probe.safetensors"
        try:
            safetensors.torch.save_file({"x": value}, probe)
            able = safetensors.torch.load_file(probe)["x"].dtype == value.dtype
        except (KeyError, ValueError, safetensors.SafetensorError):
            able = False
        assert loaded[name].dtype == (value.dtype if able else torch.uint8), name
    full.cli("import", str(tmp_path / "m.safetensors"), "--as-step", "1", "--run", "small")
    with full.open(run="small") as ckpt:
        found = ckpt.load(resume=False)
    assert found is not None
    for name, value in expected.state_dict().items():
        assert found[1]["model"][name].dtype == value.dtype, name


def test_parts_are_files_that_torch_and_dcp_load_without_tierfall(
    full: Place, tmp_path: Path
) -> None:
    expected = whole(1)["model"].state_dict()
    plain = tmp_path / "conv.pt"
    full.cli("export", "1", "--to", str(plain), "--only", "model.conv")
    loaded = torch.load(plain, weights_only=True)
    assert equal(loaded["bias"], expected["conv.bias"])
    everything = tmp_path / "all.pt"
    answer = full.cli("export", "1", "--to", str(everything))
    assert "weights_only" in answer.out + answer.err, "it has the random state of NumPy"
    assert torch.load(everything, weights_only=False)["progress"] == Progress(1, Decimal("0.25"))
    folder = tmp_path / "dcp"
    full.cli("export", "1", "--to", str(folder), "--format", "dcp", "--only", "model.conv")
    state = {name: torch.zeros_like(expected[f"conv.{name}"]) for name in ("weight", "bias")}
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = {name.rpartition(".")[2]: name for name in metadata}
    state = {names[name]: tensor for name, tensor in state.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert equal(state[names["bias"]], expected["conv.bias"])


def test_an_existing_file_is_replaced_by_force_alone_and_contradictions_are_refused(
    full: Place, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("mine")
    assert "--force" in full.cli("export", "1", "--to", str(path), code=-1).err
    assert path.read_text() == "mine"
    full.cli("export", "1", "--to", str(path), "--force")
    assert safetensors.torch.load_file(path)
    for words in (
        ["--to", str(tmp_path / "a.safetensors"), "--format", "torch"],
        ["--to", str(tmp_path / "b"), "--only", "nothing"],
        ["--to", str(tmp_path / "c"), "--max-shard", "1MB"],
        ["--to", str(tmp_path / "d"), "--only", "model", "--dtype", "int8"],
    ):
        full.cli("export", "1", *words, code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors"]


def test_each_chunk_is_read_from_a_good_copy_and_without_one_nothing_is_written(
    place: Place, tmp_path: Path
) -> None:
    place.config(disk={}, far={"compress": {"codec": "zstd"}})
    save(place, 1)
    flip(folder_of(place, 1) / IMAGE, -1)
    out = place.memory / "out"
    document = place.json("export", "1", "--to", str(out / "good.safetensors"))
    assert set(document["sources"]) == {"disk", "far"}
    assert "on disk" in document["fallbacks"][0]["what"]
    assert equal(
        safetensors.torch.load_file(out / "good.safetensors")["w"], torch.full((20_000,), 1.0)
    )
    answer = place.cli(
        "export", "1", "--to", str(out / "bad.safetensors"), "--tier", "disk", code=1
    )
    assert "disk" in answer.err
    assert [path.name for path in out.iterdir()] == ["good.safetensors"]
