"""What other programs saved, as a state of tierfall: which dicts become modules, optimizers and other objects.

A dict whose values are all tensors becomes a module, and a dict that an optimizer, a scheduler or a scaler returned
becomes that, so that a restore fills the object. Classes are unknown, so a restore compares none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.state.state_dicts import state_dict_of
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state

_EXTRA = "_extra_state"
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_DDP = "module."


class ImportedModule(nn.Module):
    """Tensors under the names of a module's state_dict, with what is no tensor."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__()
        self.rest = {key: v for key, v in entries.items() if not isinstance(v, torch.Tensor)}
        for key, value in entries.items():
            if key not in self.rest:
                self._parameters[key] = nn.Parameter(value, requires_grad=False)

    def parameter(self, name: str) -> nn.Parameter | None:
        """Return the tensor of that name."""
        return self._parameters.get(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return all entries."""
        return {**super().state_dict(*args, **kwargs), **self.rest}


class ImportedOptimizer(Optimizer):
    """The groups and the state of an optimizer's state_dict, whose parameters are found by name or not at all."""

    def __init__(self, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
        super().__init__([nn.Parameter(torch.empty(0))], {})
        self.param_groups = groups
        self.state.update(state)


class ImportedObject:
    """What the state_dict of an object of another class returned."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[Any, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self._state = state


@dataclass(slots=True)
class ImportedState:
    """A state under construction. ``stripped`` counts the names that lost the prefix of a wrapper."""

    entries: dict[str, Any] = field(default_factory=dict)
    stripped: int = 0
    _modules: list[ImportedModule] = field(default_factory=list)

    def view(self) -> StateView:
        """Walk the state. Raises CaptureError for what no state may hold."""
        view = walk_state(self.entries, with_random=False)
        return replace(view, types={}, structure=(*view.structure[:-1], {}))

    def add(self, entries: Mapping[Any, Any]) -> None:
        """Add entries, modules first: the names of an optimizer's parameters are theirs."""
        with_modules = {str(key): self._with_modules(value) for key, value in entries.items()}
        self.entries |= {key: self._with_objects(value) for key, value in with_modules.items()}

    def _with_modules(self, value: Any) -> Any:
        if is_module(value):
            return self._module(value)
        return value if is_optimizer(value) else _map(value, self._with_modules)

    def _module(self, value: Mapping[str, Any]) -> ImportedModule:
        named = strip_wrappers(value)
        self.stripped += sum(1 for old, new in zip(value, named, strict=True) if old != new)
        module = ImportedModule(dict(zip(named, value.values(), strict=True)))
        self._modules.append(module)
        return module

    def _with_objects(self, value: Any) -> Any:
        if is_optimizer(value):
            return self._optimizer(value)
        if state_dict_of(value) is not None:
            return ImportedObject(value)
        return _map(value, self._with_objects)

    def _optimizer(self, value: Mapping[str, Any]) -> ImportedOptimizer:
        """Number the parameters, or take those of the one module that has all of their names."""
        groups = value["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        names = [name for group in groups for name in group.get("param_names", group["params"])]
        known = self._parameters(names)
        made = known or [nn.Parameter(torch.empty(0)) for _ in keys]
        by_key = dict(zip(map(str, keys), made, strict=True))  # DCP makes text of numbers
        state = value["state"]
        pairs = enumerate(state) if isinstance(state, list) else state.items()
        return ImportedOptimizer(
            [
                {**group, "params": [by_key[str(key)] for key in group["params"]]}
                for group in groups
            ],
            {by_key.get(str(key), key): dict(below) for key, below in pairs},
        )

    def _parameters(self, names: list[Any]) -> list[nn.Parameter] | None:
        if not names or not all(isinstance(name, str) for name in names):
            return None
        named = strip_wrappers(names)
        for module in self._modules:
            found = [module.parameter(name) for name in named]
            if all(parameter is not None for parameter in found):
                return found  # type: ignore[return-value]
        return None


def is_module(value: object) -> bool:
    """Whether a value looks like the state_dict of a module: tensors by name, and extra states."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(
        isinstance(key, str) and (isinstance(child, torch.Tensor) or key.endswith(_EXTRA))
        for key, child in value.items()
    ) and any(isinstance(child, torch.Tensor) for child in value.values())


def is_optimizer(value: object) -> bool:
    """Whether a value is the state_dict of an optimizer: with numbered parameters, or with named ones, as DCP has
    them."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups, state = value["param_groups"], value["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
        and isinstance(state, Mapping | list)
    )


def strip_wrappers(names: Iterable[str]) -> list[str]:
    """Return names without the prefixes of DDP, ``torch.compile``, activation checkpointing and FSDP; unchanged, where
    two would become the same."""
    before = list(names)
    after = [_WRAPPERS.sub("", name) for name in before]
    if after and all(name.startswith(_DDP) and name != _DDP for name in after):
        after = [_WRAPPERS.sub("", name[len(_DDP) :]) for name in after]
    return after if len(set(after)) == len(set(before)) else before


def _map(value: Any, change: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(change(child) for child in value)
    if isinstance(value, dict):
        return {key: change(child) for key, child in value.items()}
    return value
