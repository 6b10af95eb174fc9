"""What ``tierfall export`` writes is what Hugging Face's ``from_pretrained`` loads, and what ``tierfall import`` reads
is what ``save_pretrained`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import tierfall
from tests.rank_kit import config_of, export_from
from tierfall.config import Config
from tierfall.imports.importer import import_state, read_state

transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("default")]


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_of(tmp_path)
    with tierfall.open(config) as ckpt:
        ckpt.save(8, {"model": make_model()}, block=True)
    return config


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForCausalLM"])
@pytest.mark.parametrize("max_shard", [20_000, 10**9])
def test_from_pretrained_loads_an_export(
    config: Config, out: Path, tmp_path: Path, kind: str, max_shard: int
) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path / "made")
    export_from(
        config,
        "shared",
        to=out,
        only=("model",),
        max_shard_bytes=max_shard,
        beside=(tmp_path / "made/config.json",),
    )
    assert (out / "model.safetensors.index.json").exists() == (max_shard < 10**9)
    loaded = getattr(transformers, kind).from_pretrained(out)
    whole = model.model if kind == "AutoModel" else model
    assert_same(loaded, whole)


def test_from_pretrained_loads_half_of_the_bytes(config: Config, out: Path, tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path / "made")
    beside = (tmp_path / "made/config.json",)
    words: dict[str, Any] = {"max_shard_bytes": 20_000, "dtype": torch.bfloat16, "beside": beside}
    export_from(config, "shared", to=out, only=("model",), **words)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert_same(loaded, model.to(torch.bfloat16))


@pytest.mark.parametrize("max_shard", [20_000, 10**9])
def test_an_export_is_the_folder_that_a_loader_by_file_names_reads(
    config: Config, out: Path, tmp_path: Path, max_shard: int
) -> None:
    """vLLM's default loader takes all ``*.safetensors`` of a folder, or those that its index names, all of which must
    exist; it needs ``architectures`` of config.json, and a tokenizer."""
    made = tmp_path / "made"
    model = make_model()
    model.save_pretrained(made)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(made)
    beside = tuple(path for path in made.iterdir() if path.suffix == ".json")
    options: dict[str, Any] = {"max_shard_bytes": max_shard, "beside": beside}
    export_from(config, "shared", to=out, only=("model",), **options)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    found = {}
    for file in files:
        with safetensors.safe_open(out / file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if max_shard == 20_000:
        count = len(files)
        assert count > 1
        assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(files)
    else:
        assert files == ["model.safetensors"]
    assert transformers.AutoConfig.from_pretrained(out).architectures == ["LlamaForCausalLM"]
    assert transformers.AutoTokenizer.from_pretrained(out).encode("b") == [1]


def assert_same(loaded: Any, model: Any) -> None:
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_save_pretrained_wrote_is_imported_and_trained_on(tmp_path: Path) -> None:
    model = make_model(3)
    folder = tmp_path / "hub"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    config = config_of(tmp_path)
    for tier in config.written:
        Path(str(tier.folder)).mkdir(exist_ok=True)
    import_state(config, read_state(folder), 0)
    other = make_model(4)
    with tierfall.open(config) as ckpt:
        ckpt.restore({"model": other}, strict=False)  # the file has tied weights once
    assert_same(other, model)
