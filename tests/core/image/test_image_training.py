"""A GPT-like model with tied weights and fp32 moments for bf16 parameters goes on after a restore bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from image_help import deliver, header_of, load, make_image
from torch import nn

from tierfall.core.load.fill import plan_fill


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0] + self.mlp(y)


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 31, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps fp32 moments and an fp32 master copy of bf16 parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["master"] = parameter.float().clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                state["step"] += 1
                gradient = parameter.grad.float()
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                rate = group["lr"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                state["master"] -= rate * state["exp_avg"]
                parameter.copy_(state["master"])


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Gpt().bfloat16()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = MasterAdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        "extra": {"step": 0, "losses": []},
    }


def train(state: dict[str, Any], steps: int) -> None:
    model = state["model"]
    for _ in range(steps):
        tokens = torch.randint(0, 31, (2, 8))
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["extra"]["step"] += 1
        state["extra"]["losses"].append(loss.item())


def test_training_goes_on_bit_for_bit() -> None:
    state = make(0)
    train(state, 3)
    image, layout = make_image(state)
    names = [placement.name for placement in layout.placements]
    assert (
        len([name for name in names if name in ("model.head.weight", "model.embedding.weight")])
        == 1
    )
    train(state, 2)

    other = make(1)
    train(other, 1)
    header = header_of(image)
    plan = plan_fill(other, header)
    deliver(plan.fills, image, header.data_start)
    plan.finish()
    model, optimizer = other["model"], other["optimizer"]
    assert model.head.weight is model.embedding.weight
    moments = optimizer.state[model.embedding.weight]
    assert {k: v.dtype for k, v in moments.items()} == dict.fromkeys(moments, torch.float32)
    assert other["extra"]["step"] == 3
    assert model.seen.item() == 3 * 16
    train(other, 2)
    assert other["extra"] == state["extra"]
    for a, b in zip(state["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        one, two = state["optimizer"].state[a], optimizer.state[b]
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_loaded_state_fits_stock_load_state_dict() -> None:
    state = make(0)
    train(state, 2)
    loaded = load(make_image(state)[0])
    other = make(1)
    other["model"].load_state_dict(loaded["model"])
    other["optimizer"].load_state_dict(loaded["optimizer"])
    other["scheduler"].load_state_dict(loaded["scheduler"])
    assert loaded["model"]["head.weight"] is loaded["model"]["embedding.weight"]
    assert other["scheduler"].state_dict() == state["scheduler"].state_dict()
    assert loaded["extra"] == state["extra"]
