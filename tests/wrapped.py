"""A wrapper subclass in the manner of torchao's: integer codes and a nested wrapper of scales, with a context."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Wrapper(torch.Tensor):
    """The base of both: ``ATTRIBUTES`` are its inner tensors, ``context`` any value."""

    ATTRIBUTES: tuple[str, ...]
    context: Any

    @staticmethod
    def __new__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, strides=stride, dtype=torch.float32, device=next(iter(inner.values())).device
        )

    def __init__(
        self, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> None:
        self.__dict__.update(inner)
        self.context = context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.ATTRIBUTES), self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner, context, size, stride)

    def values(self) -> torch.Tensor:
        raise NotImplementedError

    def assign(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def each(self, function: Any) -> Any:
        inner = {name: function(getattr(self, name)) for name in self.ATTRIBUTES}
        return type(self)(inner, self.context, self.size(), self.stride())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default):
            made = args[0].each(func)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is aten.copy_.default and isinstance(args[0], Wrapper):
            source = args[1]
            args[0].assign(source.values() if isinstance(source, Wrapper) else source)
            return args[0]
        plain = [each.values() if isinstance(each, Wrapper) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Table(Wrapper):
    ATTRIBUTES = ("numbers",)
    numbers: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.numbers

    def assign(self, values: torch.Tensor) -> None:
        self.numbers.copy_(values)


class Coded(Wrapper):
    """Rows of int8 codes times a scale each."""

    ATTRIBUTES = ("codes", "scale")
    codes: torch.Tensor
    scale: Table

    @classmethod
    def of(cls, values: torch.Tensor, context: Any = None) -> Any:
        if context is None:
            context = {"dtype": torch.float32, "block": (1, values.shape[1])}
        rows, columns = values.shape
        scale = Table({"numbers": torch.ones(rows, 1)}, None, (rows, 1), (1, 1))
        inner = {"codes": torch.zeros(rows, columns, dtype=torch.int8), "scale": scale}
        made = cls(inner, context, values.shape, (columns, 1))
        made.assign(values)
        return made

    def values(self) -> torch.Tensor:
        return self.codes * self.scale.numbers

    def assign(self, values: torch.Tensor) -> None:
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self.scale.assign(scale)
        self.codes.copy_((values / scale).round())


class CodedMomentum(torch.optim.Optimizer):
    """Momentum whose buffers are ``Coded``, changed in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Coded.of(parameter.grad)
                momentum = state["momentum"]
                momentum.assign(0.9 * momentum.values() + parameter.grad)
                parameter.sub_(group["lr"] * momentum.values())


def parts_of(coded: Any) -> list[torch.Tensor]:
    return [coded.codes, coded.scale.numbers]


def is_same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, parts_of(one), parts_of(other))) and one.context == other.context
