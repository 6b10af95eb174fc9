"""``tierfall import``: what other programs saved becomes a step as any other: loaded, restored and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierfall
from tests.imports.foreign import (
    Trained,
    assert_same_model,
    assert_same_optimizer,
    dcp_state,
    fresh,
    save_dcp,
    save_sharded,
    save_torch,
)
from tierfall.config import Config, load_config
from tierfall.core.types.errors import CapacityError, ConfigError, StepError
from tierfall.imports.importer import ImportResult, import_state, read_state

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Config:
    """Two stored tiers; the second one packs, and is flushed to rarely."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "far").mkdir()
    return load_config(
        make_config(disk={}, far={"flush": {"every": 100}, "compress": {"codec": "planes"}})
    )


@pytest.fixture
def trained() -> Trained:
    return Trained()


def bring_in(config: Config, path: Path, step: int = 7, **words: Any) -> ImportResult:
    return import_state(config, read_state(path, **words), step)


def restored(config: Config, state: dict[str, Any], **words: Any) -> None:
    """Restore a step into a state, as a training would."""
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state, **words)
        assert report is not None
        assert report.fallbacks == ()


# Formats ---------------------------------------------------------------------------------------------


def test_a_safetensors_file_becomes_the_model(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(trained.model.state_dict(), path)
    done = bring_in(config, path)
    assert (done.id.step, done.format, done.entries) == (7, "safetensors", ("model",))
    assert (done.tiers, done.left, done.notes) == (("disk", "far"), (), ())
    loaded = tierfall.load(config, step=7)
    assert loaded.keys() == {"model"}
    fresh().model.load_state_dict(loaded["model"])
    for tier in ("disk", "far"):
        found = fresh()
        restored(config, {"model": found.model}, tier=tier)
        assert_same_model(found, trained)


def test_shards_become_one_model_of_any_name(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    folder = save_sharded(tmp_path / "hub", trained.model.state_dict(), shards=3)
    (folder / "config.json").write_text("{}")
    done = bring_in(config, folder, entry="teacher")
    assert done.tensors == len(trained.model.state_dict())
    found = fresh()
    restored(config, {"teacher": found.model})
    assert_same_model(found, trained)


def test_tied_weights_stay_tied(config: Config, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    assert bring_in(config, tmp_path / "tied.pt").tensors == 1
    loaded = tierfall.load(config)["model"]
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    assert torch.equal(loaded["0.weight"], model[0].weight)


def test_a_dcp_folder_continues_a_training_by_the_names_of_its_parameters(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    done = bring_in(config, save_dcp(tmp_path / "dcp", dcp_state(trained)))
    assert (done.format, done.entries) == ("dcp", ("model", "optimizer", "epoch"))
    found = fresh()
    groups = [
        {"params": [found.model[2].bias, found.model[2].weight]},
        {"params": [*found.model[0].parameters(), *found.model[1].parameters()]},
    ]
    with tierfall.open(config) as ckpt:
        other = {"model": found.model, "optimizer": torch.optim.AdamW(groups)}
        with pytest.raises(tierfall.errors.RestoreError, match="no parameter group"):
            ckpt.restore(other, only=["model", "optimizer"])
    restored(config, {"model": found.model, "optimizer": found.optimizer, "epoch": 0})
    assert_same_model(found, trained)
    assert_same_optimizer(found, trained)


def test_a_dcp_folder_keeps_lists_and_values(config: Config, tmp_path: Path) -> None:
    state = {
        "list": [torch.arange(3), {"a": torch.ones(2), "b": "text"}],
        "plain": {"names": ["x", "y"], "n": 3, "none": None},
        "empty": torch.empty(0, 4),
    }
    bring_in(config, save_dcp(tmp_path / "dcp", state))
    loaded = tierfall.load(config)
    assert loaded["plain"] == state["plain"]
    assert torch.equal(loaded["list"][0], torch.arange(3))
    assert loaded["list"][1]["b"] == "text"
    assert loaded["empty"].shape == (0, 4)


def test_blocks_of_several_ranks_are_put_together(config: Config, tmp_path: Path) -> None:
    """Two ranks' blocks, as DCP's own writer has them: here in the files of one."""
    import pickle

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.arange(24.0).view(4, 6)
    folder = save_dcp(
        tmp_path / "dcp", {"a": whole[:, :2].clone(), "b": whole[:, 2:].clone(), "n": 1}
    )
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    made = entries.pop("a")
    entries.pop("b")
    made.size = whole.shape
    made.chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2])),
        ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([4, 4])),
    ]
    entries["w"] = made
    for name, offset in (("a", [0, 0]), ("b", [0, 2])):
        index = next(index for index in storage if index.fqn == name)
        storage[MetadataIndex("w", offset)] = storage.pop(index)
    metadata.planner_data = {"w": ("w",), "n": ("n",)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    bring_in(config, folder)
    assert torch.equal(tierfall.load(config)["w"], whole)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed(
    config: Config, tmp_path: Path, trained: Trained, prefix: str
) -> None:
    named = {prefix + name: tensor for name, tensor in trained.model.state_dict().items()}
    torch.save(
        {"model": named, "optimizer": trained.optimizer.state_dict()}, tmp_path / "wrapped.pt"
    )
    done = bring_in(config, tmp_path / "wrapped.pt")
    assert f"from {len(named)} names" in done.notes[0]
    found = fresh()
    restored(config, {"model": found.model, "optimizer": found.optimizer})
    assert_same_model(found, trained)


def test_a_child_that_is_called_module_keeps_its_name(config: Config, tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "head": torch.ones(3)}, tmp_path / "m.pt")
    bring_in(config, tmp_path / "m.pt")
    assert tierfall.load(config)["model"].keys() == {"module.w", "head"}


# A step as any other ----------------------------------------------------------------------------------


def test_an_imported_step_is_exported_and_trained_on(
    config: Config, tmp_path: Path, trained: Trained, out: Path
) -> None:
    from tests.rank_kit import export_from

    bring_in(config, save_torch(tmp_path / "c.pt", trained))
    done = export_from(config, "far", to=out, only=("model",))
    opened = safetensors.torch.load_file(done.path)
    assert all(torch.equal(opened[n], t) for n, t in trained.model.state_dict().items())
    found = fresh()
    state = {**found.parts, "epoch": 0}
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(state).step == 7
        ckpt.save(8, state, block=True)
        assert [(i.step, i.abandoned) for i in ckpt.checkpoints()] == [(7, False), (8, False)]


def test_it_follows_older_steps_and_abandons_none(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.save(5, {"w": torch.ones(3)}, block=True)
    path = save_torch(tmp_path / "c.pt", trained)
    bring_in(config, path, 7)
    with tierfall.open(config) as ckpt:
        assert [(i.step, i.abandoned, i.ordinal) for i in ckpt.checkpoints()] == [
            (5, False, 1),
            (7, False, 2),
        ]
    for step, why in ((7, "has it already"), (6, "has the newer step 7@2")):
        with pytest.raises(StepError, match=f"step {step} of run 'run': the run {why}"):
            bring_in(config, path, step)
    with pytest.raises(StepError, match="step -1 is not from 0"):
        bring_in(config, path, -1)


def test_a_tier_that_cannot_be_read_may_hold_a_newer_step(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    path = save_torch(tmp_path / "c.pt", trained)
    bring_in(config, path, 7)
    (tmp_path / "far").rename(tmp_path / "unmounted")
    with pytest.raises(StepError, match="far could not be read, and may hold step 8"):
        bring_in(config, path, 8)


def test_what_a_tier_cannot_hold_is_not_begun(
    make_config: MakeConfig, tmp_path: Path, trained: Trained
) -> None:
    (tmp_path / "disk").mkdir()
    config = load_config(make_config(disk={"capacity": "64KiB"}))
    with pytest.raises(CapacityError, match="import to disk: it needs"):
        bring_in(config, save_torch(tmp_path / "c.pt", trained))
    assert not list((tmp_path / "disk").rglob("step-*"))


def test_a_read_only_tier_gets_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    words = make_config(disk={})
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    bring_in(load_config(words), tmp_path / "c.pt", 1)
    (only,) = [tier for tier in words["tiers"] if tier["name"] == "disk"]
    only["read_only"] = True
    with pytest.raises(ConfigError, match=r"import: .* no stored tier that may be written"):
        bring_in(load_config(words), tmp_path / "c.pt", 2)


def test_a_failure_within_the_image_leaves_nothing(
    config: Config, tmp_path: Path, trained: Trained
) -> None:
    """A file of DCP is truncated: its .metadata is whole, so that only the write finds it."""
    folder = save_dcp(tmp_path / "dcp", dcp_state(trained))
    read = read_state(folder)
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-3000])
    with pytest.raises(tierfall.errors.IntegrityError, match="damaged, or truncated"):
        import_state(config, read, 7)
    assert not [path for path in (tmp_path / "disk").rglob("step-*") if any(path.iterdir())]
    with tierfall.open(config) as ckpt:
        assert ckpt.restore({"w": torch.ones(1)}) is None


def test_json_of_the_index_is_not_trusted(tmp_path: Path, trained: Trained) -> None:
    folder = save_sharded(tmp_path / "hub", trained.model.state_dict())
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    for name in ("../m.safetensors", "/etc/passwd", 3, ""):
        document["weight_map"]["0.bias"] = name
        index.write_text(json.dumps(document))
        with pytest.raises(tierfall.errors.IntegrityError, match="is not the name of a file"):
            read_state(folder)
