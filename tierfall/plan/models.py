"""The parameters of a model: of a preset, of a Hugging Face ``config.json``, or a number alone.

A part of a model is counted in three: what tensor parallelism divides, what each of its ranks holds whole (norms,
biases of row-parallel products, routers), and experts, which expert parallelism divides, too. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hint_at


class Block(NamedTuple):
    """Numbers of parameters: ``split`` by tensor parallelism, ``whole`` on each rank, ``experts`` split by expert and
    tensor parallelism."""

    split: int = 0
    whole: int = 0
    experts: int = 0

    def plus(self, *others: Block) -> Block:
        return Block(*map(sum, zip(self, *others, strict=True)))


EMPTY = Block()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: embedding, layers in their order, head. ``heads`` and ``experts`` bound what parallelism divides (0:
    unknown)."""

    name: str
    embedding: Block = EMPTY
    layers: tuple[Block, ...] = ()
    head: Block = EMPTY
    hidden: int = 0
    heads: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        return sum(self.embedding.plus(self.head, *self.layers))

    @property
    def active(self) -> int:
        """The parameters that one token uses."""
        idle = self.experts - self.experts_per_token
        experts = sum(layer.experts for layer in self.layers)
        return self.parameters - experts * idle // max(1, self.experts)


COUNT_MAX = 1_000_000
_PARAMETERS_MIN = 10_000
"""Fewer are a number without its unit."""
_PARAMETERS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kKmMbBtT]?)")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_parameters(text: str) -> int:
    """Parse a number of parameters: ``125M``, ``7B``; 0: it is unknown. Raises ConfigError."""
    text = text.strip()
    if text in ("", "unknown"):
        return 0
    found = _PARAMETERS.fullmatch(text)
    count = int(Decimal(found[1]) * _SCALES[found[2].lower()]) if found else 0
    if not _PARAMETERS_MIN <= count < 10**15:
        guess = f"{text} or {text}B? " if found and not found[2] else f"{text!r} does not fit; "
        raise ConfigError(
            f"{guess}expected a number of parameters such as 125M, 7B or 1.5e9; of a model with less than "
            f"{_PARAMETERS_MIN:,}, leave it unknown"
        )
    return count


# What a config.json says -----------------------------------------------------------------------------


class _Keys:
    """The members of a ``config.json``; of several names, the first that is there."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.hidden = self.number("hidden_size", "n_embd")
        self.heads = self.number("num_attention_heads", "n_head")
        self.count = self.number("num_hidden_layers", "n_layer")
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        self.experts = self.number(*names, default=0)
        counts = (self.hidden, self.heads, self.count, self.experts or 1)
        if not all(0 < count <= COUNT_MAX for count in counts):
            raise ConfigError(
                f"{where}: hidden size, heads, layers, experts: {counts}; expected 1 to {COUNT_MAX:,} of each"
            )
        self.head_dim = self.number("head_dim", default=self.hidden // self.heads)

    def number(self, *names: str, default: int | None = None) -> int:
        value = next((v for n in names if (v := self.values.get(n)) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.where}: {names[0]}: {value!r}; expected a whole number")
        return value

    def gated(self, *names: str, default: int | None = None) -> int:
        """Gate, up and down of an MLP."""
        return 3 * self.hidden * self.number(*names, default=default)

    def attention(self, *, norms: int = 2, qkv: bool = False, out: bool = False) -> Block:
        """Query, key, value and output, with biases, and norms of the hidden size."""
        keys = self.number("num_key_value_heads", default=self.heads) * self.head_dim
        queries, h = self.heads * self.head_dim, self.hidden
        biases = queries + 2 * keys if qkv else 0
        return Block(2 * h * (queries + keys) + biases, h * (norms + out))


Layer = Callable[[_Keys, int], Block]


def _dense(*, norms: int = 2, qkv: bool = False, of_head: bool = False) -> Layer:
    """A layer of Llama and its kin. ``qkv``: with biases there in any case; ``of_head``: with norms of one query and
    one key head."""

    def layer(c: _Keys, index: int) -> Block:
        biased, inner = bool(c.values.get("attention_bias")), c.number("intermediate_size")
        mlp = Block(2 * inner, c.hidden) if c.values.get("mlp_bias") else EMPTY
        heads = Block(whole=2 * c.head_dim * of_head)
        attention = c.attention(norms=norms, qkv=biased or qkv, out=biased)
        return attention.plus(Block(c.gated("intermediate_size")), mlp, heads)

    return layer


def _mixtral(c: _Keys, index: int) -> Block:
    experts = c.experts * c.gated("intermediate_size")
    return c.attention().plus(Block(whole=c.experts * c.hidden, experts=experts))


def _qwen3_moe(c: _Keys, index: int) -> Block:
    every = c.number("decoder_sparse_step", default=1)
    dense = c.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not every:
        what = f"mlp_only_layers, decoder_sparse_step: {dense}, {every}"
        raise ConfigError(f"{c.where}: {what}; expected a list, and 1 or more")
    if index in dense or (index + 1) % every:
        return _dense(of_head=True)(c, index)
    biased, experts = bool(c.values.get("attention_bias")), c.experts
    routed = Block(whole=experts * c.hidden, experts=experts * c.gated("moe_intermediate_size"))
    return c.attention(qkv=biased, out=biased).plus(routed, Block(whole=2 * c.head_dim))


def _deepseek_v3(c: _Keys, index: int) -> Block:
    """Multi-head latent attention; the first layers are dense, the others have shared experts, too."""
    h, rope, values = c.hidden, c.number("qk_rope_head_dim"), c.heads * c.number("v_head_dim")
    plain = c.heads * c.number("qk_nope_head_dim")
    latent, rank = c.number("kv_lora_rank"), c.number("q_lora_rank", default=0)
    queries = plain + c.heads * rope
    asked = Block(rank * queries, h * rank + rank) if rank else Block(h * queries)
    kept = Block(latent * (plain + values) + values * h, h * (latent + rope) + latent)
    attention = asked.plus(kept, Block(whole=2 * h))
    if index < c.number("first_k_dense_replace", default=0):
        return attention.plus(Block(c.gated("intermediate_size")))
    one = c.gated("moe_intermediate_size")
    shared = one * c.number("n_shared_experts", default=0)
    return attention.plus(Block(shared, c.experts * h, c.experts * one))


def _gpt2(c: _Keys, index: int) -> Block:
    h, inner = c.hidden, c.number("n_inner", default=4 * c.hidden)
    return Block(4 * h * h + 3 * h + 2 * h * inner + inner, 6 * h)


FAMILIES: Mapping[str, Layer] = {
    "llama": _dense(),
    "mistral": _dense(),
    "phi3": _dense(),
    "gemma": _dense(),
    "gemma2": _dense(norms=4),
    "qwen2": _dense(qkv=True),
    "qwen3": _dense(of_head=True),
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
"""The architectures whose parameters are counted: one layer, by the ``model_type`` of ``config.json``."""
_TIED = ("gemma", "gemma2", "gpt2")
"""Their head is their embedding, unless the file says otherwise."""


def count_parameters(values: Mapping[str, Any], *, where: str = "config.json") -> Model:
    """Count the parameters of a model by the members of its ``config.json``. Raises ConfigError."""
    kind = str(values.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type {kind!r} is not an architecture whose parameters are counted; expected one of "
            f"{', '.join(FAMILIES)}{hint_at(kind, FAMILIES)}; any other model is planned by its number of parameters: "
            "tierfall plan 7B"
        )
    c = _Keys(values, where)
    vocabulary, tied = c.number("vocab_size"), values.get("tie_word_embeddings")
    tied = kind in _TIED if tied is None else tied
    positions = c.number("n_positions", default=0) * c.hidden if kind == "gpt2" else 0
    return Model(
        name=kind,
        embedding=Block(vocabulary * c.hidden, positions),
        layers=tuple(FAMILIES[kind](c, index) for index in range(c.count)),
        head=Block(0 if tied else vocabulary * c.hidden, c.hidden * (2 if kind == "gpt2" else 1)),
        hidden=c.hidden,
        heads=c.heads,
        experts=c.experts,
        experts_per_token=min(c.experts, c.number("num_experts_per_tok", default=2)),
    )


# Presets ---------------------------------------------------------------------------------------------

_SHAPE: tuple[str, ...] = ("model_type", "hidden_size", "intermediate_size")
_SHAPE += ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3 = {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 1536}
_QWEN3 |= {"num_experts_per_tok": 8}
_DEEPSEEK = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
_DEEPSEEK |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3}
_DEEPSEEK |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
_DEEPSEEK |= {"moe_intermediate_size": 2048}
PRESETS: Mapping[str, tuple[tuple[Any, ...], Mapping[str, int]]] = {
    "llama3-8b": (("llama", 4096, 14_336, 32, 8, 32, 128_256), {}),
    "llama3-70b": (("llama", 8192, 28_672, 64, 8, 80, 128_256), {}),
    "llama3-405b": (("llama", 16_384, 53_248, 128, 8, 126, 128_256), {}),
    "mixtral-8x7b": (("mixtral", 4096, 14_336, 32, 8, 32, 32_000), _MIXTRAL),
    "qwen3-235b-a22b": (("qwen3_moe", 4096, 12_288, 64, 4, 94, 151_936), _QWEN3),
    "deepseek-v3": (("deepseek_v3", 7168, 18_432, 128, 128, 61, 129_280), _DEEPSEEK),
    "megatron-1t": (("gpt2", 25_600, 102_400, 160, 160, 128, 51_200), {"n_positions": 2048}),
    "mlperf-70b": (("llama", 8192, 28_672, 128, 8, 80, 128_256), {}),
    "mlperf-1t": (("llama", 25_872, 98_304, 192, 32, 128, 128_256), {}),
}
"""By name: the members of a ``config.json``, as published; DeepSeek's without multi-token prediction. megatron-1t is of
Megatron-LM (SC'21), mlperf-70b and mlperf-1t are MLPerf Storage's own."""


def find_model(text: str) -> Model:
    """Return the model that a person names: a preset, the path of a ``config.json`` or of its folder, or a number of
    parameters. Raises ConfigError."""
    if text in PRESETS:
        shape, more = PRESETS[text]
        values = {**dict(zip(_SHAPE, shape, strict=True)), **more}
        return replace(count_parameters(values, where=text), name=text)
    path = Path(text).expanduser()
    if path.suffix == ".json" or path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            read: Any = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; expected a config.json") from error
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise ConfigError(f"{path}: is no JSON object; expected a config.json")
        return count_parameters(read, where=str(path))
    if _PARAMETERS.fullmatch(text.strip()):
        count = Block(parse_parameters(text))
        return Model(name=text.strip(), head=count)
    raise ConfigError(
        f"{text!r} is no model; expected one of {', '.join(PRESETS)}, the path of a config.json, or a number of "
        f"parameters such as 7B{hint_at(text, PRESETS)}"
    )
