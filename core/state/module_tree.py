"""Module trees whose ``state_dict`` depends on nothing but their tensors: no hooks, no overridden methods.

A walk that finds such a tree in the shape of the last walk needs no call of ``state_dict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

_TREE_MODULES_MAX = 1 << 20
"""A tree with more modules contains itself."""


class ModuleTreeShape(NamedTuple):
    """Everything but the tensors that determines the entries of a module tree's ``state_dict``."""

    modules: list[type[Any]]
    lengths: list[list[int]]
    keys: list[list[str]]
    tensors: list[type[Any]]
    not_persistent: list[frozenset[str]]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """A module and its descendants, all with the ``state_dict`` of nn.Module and without hooks or extra state. In
    ``tensors``, the first ``parameters`` are parameters, the others buffers."""

    shape: ModuleTreeShape
    modules: list[nn.Module]
    parameters: int
    tensors: list[torch.Tensor | None]


def tree_of(root: nn.Module) -> ModuleTree | None:
    """The tree of a module; None if anything but its tensors determines its state_dict."""
    modules = [root]
    children: list[Any] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    not_persistent = []
    for module in modules:  # grows during the loop
        own = module.__dict__
        if "state_dict" in own or "_save_to_state_dict" in own:
            return None
        if own.get("_state_dict_hooks", 1) or own.get("_state_dict_pre_hooks", 1):
            return None
        below = own.get("_modules")
        children.append(below)
        parameters.append(own.get("_parameters"))
        buffers.append(own.get("_buffers"))
        if below:
            modules += [child for child in below.values() if child is not None]
        if hidden := own.get("_non_persistent_buffers_set"):
            not_persistent.append(frozenset(hidden))
        if len(modules) > _TREE_MODULES_MAX:
            return None
    kinds = [*map(type, modules)]
    tables = (children, parameters, buffers)
    if not all(map(_is_stock, set(kinds))) or set(map(type, chain(*tables))) != {dict}:
        return None
    tensors: list[torch.Tensor | None] = [*chain.from_iterable(map(dict.values, parameters))]
    count = len(tensors)
    tensors += chain.from_iterable(map(dict.values, buffers))
    found = [*map(type, tensors)]
    if not set(found) <= _PLAIN_KINDS:
        return None
    shape = ModuleTreeShape(
        kinds,
        [[*map(len, table)] for table in tables],
        [[*chain.from_iterable(table)] for table in tables],
        found,
        not_persistent,
    )
    return ModuleTree(shape, modules, count, tensors)


_PLAIN_KINDS = {torch.Tensor, nn.Parameter, type(None)}


def _is_stock(kind: type[nn.Module]) -> bool:
    """Whether a class builds its state_dict as nn.Module does."""
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModuleTree:
    """The state_dict of a tree of some shape, as indices into the tree's tensors.

    ``parameters`` are the names of the parameters, ``parameters_at`` their indices. ``entries_at`` are the indices of
    the state_dict's entries, in its order; ``buffers`` are the positions of those that are buffers. ``declared`` is
    the ``changes`` of the ``item()`` around the module."""

    shape: ModuleTreeShape
    parameters: tuple[str, ...]
    parameters_at: tuple[int, ...]
    entries_at: tuple[int, ...]
    buffers: tuple[int, ...]
    declared: object
