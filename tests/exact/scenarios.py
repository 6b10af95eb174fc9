"""Small training programs: one for each optimizer, scheduler and kind of module that an exact resume is tried with.

A scenario has a ``state`` as users hand it to save() and restore(), and trains by ``step``. What it draws comes from
the step's number or from the global generator, so that a run that goes on from a restored state can be compared bit
for bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

from tierfall import item

WIDTH = 8
OVERFLOW_AT = 3
"""The step whose loss is infinite, where there is a gradient scaler."""


class Scenario:
    """One model that one optimizer trains; see the module. Further entries of ``state`` are set by subclasses."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = make_optimizer(model)
        self.state: dict[str, Any] = {"model": model, "optimizer": self.optimizer}
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        if self.scheduler is not None:
            self.state["scheduler"] = self.scheduler
        self.losses: list[float] = []

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))

    def loss(self, number: int) -> torch.Tensor:
        batch = self.batch(number)
        if next(self.model.parameters()).dtype is torch.bfloat16:
            batch = batch.bfloat16()
        found: torch.Tensor = self.model(batch).pow(2).mean()
        return found

    def step(self, number: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        # Only some optimizers evaluate the closure again; all return its loss.
        found: Any = self.optimizer.step(closure)
        self.losses.append(float(found.detach()))
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self.losses[-1])
        elif self.scheduler is not None:
            self.scheduler.step()


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.2), nn.GELU(), nn.Linear(12, WIDTH))


# Optimizers ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {}),
    "Adafactor": ("Adafactor", {}),
    "Adagrad": ("Adagrad", {}),
    "Adam": ("Adam", {}),
    "Adam, amsgrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, one by one": ("AdamW", {"foreach": False}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {"t0": 2}),
    "LBFGS": ("LBFGS", {"max_iter": 3, "lr": 0.1}),
    "Muon": ("Muon", {}),
    "NAdam": ("NAdam", {"momentum_decay": 0.01}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Rprop": ("Rprop", {}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD, fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adagrad, fused": ("Adagrad", {"fused": True}),
}


def with_optimizer(name: str) -> Scenario:
    kind, options = OPTIMIZERS[name]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if kind != "Muon" or p.ndim == 2]
        found: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, **options)
        return found

    return Scenario(plain_model(), make)


class Sparse(Scenario):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        embedding = nn.Embedding(20, WIDTH, sparse=True)
        super().__init__(embedding, lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.01))

    def loss(self, number: int) -> torch.Tensor:
        rows = torch.randint(20, (6,), generator=torch.Generator().manual_seed(number))
        found: torch.Tensor = self.model(rows).pow(2).sum()
        return found


# Schedulers ------------------------------------------------------------------------------------------


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    first = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3)
    second = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])


def _chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(optimizer, total_iters=6),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    )


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ChainedScheduler": _chained,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR, exp_range": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9
    ),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 6]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9, power=2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": _sequential,
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6),
    "LRScheduler of one's own": lambda o: Halving(o),
}


class Halving(lr_scheduler.LRScheduler):
    """A scheduler of the user's own, with a value that it counts itself."""

    halvings = 0

    def get_lr(self) -> list[float | torch.Tensor]:
        self.halvings += self.last_epoch % 3 == 2
        return [lr / 2**self.halvings for lr in self.base_lrs]


def with_scheduler(name: str) -> Scenario:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Scenario(plain_model(), make, SCHEDULERS[name])


# Modules ---------------------------------------------------------------------------------------------


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)


class Averaged(Scenario):
    """A moving average of the weights."""

    def __init__(self) -> None:
        super().__init__(plain_model(), adamw)
        self.average = swa_utils.AveragedModel(
            self.model,
            multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
        )
        self.state["average"] = item(self.average, changes="anytime")

    def step(self, number: int) -> None:
        super().step(number)
        self.average.update_parameters(self.model)


class Scaled(Scenario):
    """A gradient scaler that meets an overflow and grows again."""

    def __init__(self) -> None:
        super().__init__(plain_model(), adamw)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.state["scaler"] = self.scaler

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(number) * (float("inf") if number == OVERFLOW_AT else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(float(loss.detach()))


class Fused(nn.Module):
    """One weight that its hooks save as three."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_merge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wqkv(x)  # type: ignore[no-any-return]


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    parts = state.pop(f"{prefix}wqkv.weight").chunk(3, 0)
    state.update({prefix + name: part.clone() for name, part in zip("qkv", parts, strict=True)})


def _merge(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}q" in state:
        state[f"{prefix}wqkv.weight"] = torch.cat([state.pop(prefix + name) for name in "qkv"])


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.inner(x)[..., :WIDTH])


def sharded(inner: Callable[[], nn.Module]) -> Scenario:
    """FSDP2 around checkpoint_wrapper, as large trainers nest them."""
    model = nn.Sequential(*(checkpoint_wrapper(Block(inner())) for _ in range(2)))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Scenario(model, adamw)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    **{name: lambda name=name: with_optimizer(name) for name in OPTIMIZERS},  # type: ignore[misc]
    "SparseAdam": Sparse,
    **{name: lambda name=name: with_scheduler(name) for name in SCHEDULERS},  # type: ignore[misc]
    "moving average": Averaged,
    "gradient scaler": Scaled,
    "hooks that split": lambda: Scenario(
        nn.Sequential(Fused(), nn.Linear(3 * WIDTH, WIDTH)), adamw
    ),
    "bfloat16": lambda: Scenario(plain_model().to(torch.bfloat16), adamw),
    "FSDP2 with wrapper": lambda: sharded(lambda: nn.Linear(WIDTH, WIDTH)),
    "FSDP2 with hooks that split": lambda: sharded(Fused),
}


def build(salt: int) -> dict[str, Scenario]:
    """Build all, each from a seed of its own; another ``salt`` gives other weights."""
    found = {}
    for number, (name, make) in enumerate(SCENARIOS.items()):
        torch.manual_seed(1000 * salt + number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = make()
    return found


def digest(scenario: Scenario) -> str:
    """Digest the bits of a scenario's state, and its losses as far as they were computed here."""
    hasher = xxhash.xxh3_128()
    for key, value in scenario.state.items():
        held = getattr(value, "value", value)
        _add(hasher, key, _plain(held))
    return f"{hasher.hexdigest()} {scenario.losses[-3:]}"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else copy.copy(value)


def _add(hasher: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(f"{name} {tuple(local.shape)} {local.dtype}".encode())
        hasher.update(flat.numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(hasher, f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            _add(hasher, f"{name}.{index}", child)
    elif value is None or isinstance(value, str | int | float | bool):
        hasher.update(f"{name} {value!r}".encode())
