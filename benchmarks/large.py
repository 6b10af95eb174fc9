"""A state of billions of parameters: bf16 weights and two fp32 moments for each, 10 bytes a parameter.

About 1,000 tensors at any size. It knows nothing of tierfall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.workload import HEAD_WIDTH, Gpt, Shape, Workload

LAYERS = 20
"""With 12 tensors each, 4 more, and 4 of state for each of them."""
CONTEXT = 1024
VOCABULARY_MIN = 256
BLOCK_BYTES = 4096


def shape_of(parameters: int) -> Shape:
    """Choose a model of about so many parameters: as deep as ever, the vocabulary taking up the rest."""
    heads = int((parameters / (12 * LAYERS)) ** 0.5) // HEAD_WIDTH
    width = HEAD_WIDTH * max(1, heads)
    bare = Shape(layers=LAYERS, width=width, context=CONTEXT, vocabulary=0)
    rest = (parameters - bare.parameters) // width
    return Shape(layers=LAYERS, width=width, context=CONTEXT, vocabulary=max(VOCABULARY_MIN, rest))


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) whose moments are fp32 whatever its parameters are.

    One parameter after the other, so that the fp32 gradient of no more than one is there at a time.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step on the gradients that are there; a closure is refused by TypeError."""
        if closure is not None:
            raise TypeError("MixedAdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        first, second = group["betas"]
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        taken = int(state["step"])
        root = (state["exp_avg_sq"] / (1 - second**taken)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**taken))


class LargeWorkload(Workload):
    """A model of billions of parameters in training."""

    batch = 4

    def _make_model(self) -> Gpt:
        with torch.device(self.device):
            return Gpt(self.shape).to(torch.bfloat16)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return MixedAdamW(self.model.parameters(), lr=1e-3)


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Sum the bytes of each 4 KiB of each tensor: little to keep, though an update of the state alters it."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
        found.append(flat[:whole].view(-1, BLOCK_BYTES).sum(1, dtype=torch.int64))
        found.append(flat[whole:].sum(dtype=torch.int64))
    return found
