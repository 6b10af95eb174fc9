"""``tierfall plan`` counts the parameters that transformers makes, without making them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tierfall.plan.models import FAMILIES, PRESETS, find_model

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.quick
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
    },
}


def made(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_architecture_has_as_many_parameters(kind: str, tmp_path: Path) -> None:
    """By the file that transformers writes."""
    given = {**(SMALL if kind != "gpt2" else {"vocab_size": 500}), **OWN.get(kind, {})}
    config = transformers.AutoConfig.for_model(kind, **given)
    config.save_pretrained(tmp_path)
    assert find_model(str(tmp_path)).parameters == made(config)


@pytest.mark.parametrize("name", [each for each in PRESETS if each != "mlperf-1t"])
def test_a_preset_has_as_many_parameters(name: str) -> None:
    """But for mlperf-1t, whose heads do not divide its hidden size: transformers makes no such model."""
    shape, more = PRESETS[name]
    kind, hidden, inner, heads, kv, layers, vocabulary = shape
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    given = dict(zip(names, (hidden, inner, heads, kv), strict=True))
    given |= {"num_hidden_layers": layers, "vocab_size": vocabulary, **more}
    if kind == "gpt2":
        given = {
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": vocabulary,
            **more,
        }
    config = transformers.AutoConfig.for_model(
        kind, **{"tie_word_embeddings": kind == "gpt2", **given}
    )
    assert find_model(name).parameters == made(config)
