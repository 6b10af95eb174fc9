"""What training programs do to their state between save() and the optimizer's next step, one class each.

Most of it torch does not count: writes by ``.data``, by NumPy, by fused kernels. Some is undone before the step.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

ROWS, COLUMNS, COUNT = 512, 1024, 8  # 2 MiB a parameter


class Loop:
    """A model of several MiB in training. ``disturb`` is what the program does between ``save`` and the next step."""

    verify = "sample"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.ParameterList(torch.randn(ROWS, COLUMNS) for _ in range(COUNT))
        self.state: dict[str, Any] = {"model": self.model}
        self.make_optimizer()
        self.state["optimizer"] = self.optimizer

    def make_optimizer(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.trainable, lr=0.01)

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def step(self) -> None:
        for parameter in self.trainable:
            parameter.grad = torch.full_like(parameter, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[tuple[Any, ...], torch.Tensor]:
        """Copies of all tensors of the state, by the path at which ``tierfall.load`` has each."""
        found: dict[tuple[Any, ...], Any] = {
            ("model", key): value for key, value in self.model.state_dict().items()
        }
        for number, held in self.optimizer.state_dict()["state"].items():
            found |= {("optimizer", "state", number, key): held[key] for key in held}
        return {k: v.detach().clone() for k, v in found.items() if isinstance(v, torch.Tensor)}

    def disturb(self, attempt: int) -> None:
        raise NotImplementedError


class AveragesSwappedIn(Loop):
    """Validation with averaged weights: copied in by ``.data``, and the weights copied back."""

    def disturb(self, attempt: int) -> None:
        kept = [each.data.clone() for each in self.trainable]
        for each in self.trainable:
            each.data.copy_(each.data * 0.5)
        time.sleep(0.005 * (attempt % 4))
        for each, before in zip(self.trainable, kept, strict=True):
            each.data.copy_(before)


class AdaptersMerged(Loop):
    """An evaluation with merged adapters: a product is added to frozen weights, and subtracted again."""

    def __init__(self) -> None:
        super().__init__()
        self.base = self.model
        self.base.requires_grad_(False)
        self.low = nn.ParameterList(torch.randn(ROWS, 4) for _ in range(COUNT))
        self.high = nn.ParameterList(torch.randn(4, COLUMNS) for _ in range(COUNT))
        self.model = nn.ModuleDict({"base": self.base, "low": self.low, "high": self.high})
        self.make_optimizer()
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def disturb(self, attempt: int) -> None:
        products = [a.detach() @ b.detach() for a, b in zip(self.low, self.high, strict=True)]
        for each, product in zip(self.base.parameters(), products, strict=True):
            each.data += product
        for each, product in zip(self.base.parameters(), products, strict=True):
            each.data -= product


class MomentumEncoder(Loop):
    """A frozen encoder that follows the trained one inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = self.model
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.model = nn.ModuleDict({"online": self.online, "target": self.target})
        self.state["model"] = self.model

    def disturb(self, attempt: int) -> None:
        for online, target in zip(
            reversed([*self.online.parameters()]),
            reversed([*self.target.parameters()]),
            strict=True,
        ):
            target.data.mul_(0.9).add_(online.data, alpha=0.1)


class WrittenByNumPy(Loop):
    def disturb(self, attempt: int) -> None:
        for each in reversed(self.trainable):
            each.detach().numpy().fill(7)


class Clamped(Loop):
    """Weights that are clamped after the step (WGAN)."""

    def disturb(self, attempt: int) -> None:
        for each in reversed(self.trainable):
            each.data.clamp_(-0.01, 0.01)


class WrittenInOneKernel(Loop):
    """One slow operation, counted when it has ended, at one of several moments of the capture."""

    def disturb(self, attempt: int) -> None:
        time.sleep(0.002 * (attempt % 8))
        with torch.no_grad():
            self.trainable[-1 - attempt % 3].normal_()


class NormsClippedInForward(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 128, max_norm=1.0)
        self.model = nn.ModuleList([self.model, self.table])
        self.make_optimizer()
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def disturb(self, attempt: int) -> None:
        self.table(torch.randint(20_000, (64, 128)))


class ScaledByForeach(Loop):
    def disturb(self, attempt: int) -> None:
        with torch.no_grad():
            torch._foreach_mul_(self.trainable, 0.5)


class WeightsLoaded(Loop):
    def disturb(self, attempt: int) -> None:
        loaded = {k: torch.zeros_like(v) for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(loaded, assign=attempt % 2 == 1)


class DataReplaced(Loop):
    """Offloading: each parameter's ``.data`` becomes another tensor."""

    def disturb(self, attempt: int) -> None:
        for each in self.trainable:
            each.data = torch.zeros_like(each)


class StoragesFreed(Loop):
    """Offloading: storages are freed in place, and taken anew."""

    def disturb(self, attempt: int) -> None:
        for each in reversed(self.trainable):
            each.untyped_storage().resize_(0)
        for each in self.trainable:
            each.untyped_storage().resize_(each.numel() * each.element_size())
            each.data.zero_()


class MomentsWritten(Loop):
    """Adam's moments set to zero, by ``.data``, by a counted write, or as the optimizer's state is loaded."""

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.trainable, lr=0.01)

    def disturb(self, attempt: int) -> None:
        if attempt % 3 == 2:
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            return
        for held in self.optimizer.state.values():
            (held["exp_avg"].data if attempt % 3 else held["exp_avg"]).zero_()


class FewElements(Loop):
    """A percent of the elements of each parameter, scattered: as many as samples find."""

    def disturb(self, attempt: int) -> None:
        for each in self.trainable:
            each.data.view(-1)[attempt % 100 :: 100] = 9.0


class OneElement(Loop):
    """One element of all: what only the whole comparison finds."""

    verify = "full"

    def disturb(self, attempt: int) -> None:
        each = self.trainable[attempt % COUNT]
        each.data.view(-1)[(attempt * 7919) % each.numel()] = 9.0


SCENARIOS: tuple[type[Loop], ...] = tuple(Loop.__subclasses__())
