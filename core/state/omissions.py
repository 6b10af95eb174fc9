"""Warnings about entries that a state lacks for an exact resume. Reported at a save, since a restart is too late.

Detected are a state_dict() in place of its object, which restore() refuses in whole or in part, a parameter that an
optimizer of the state steps and no entry holds, a class that other programs cannot import, and a shuffling DataLoader
whose order is not in the state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from tierfall.core.state.item import unwrap
from tierfall.core.state.state_dicts import is_stateful, lost_entries, state_dict_of
from tierfall.core.state.view import StateView
from tierfall.core.tensors import names, tensors, value_codec
from tierfall.core.tensors.builtin_codecs import is_of_script, name_of_script
from tierfall.core.tensors.dtensor import local_tensor
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.tensors import AddressRange, AddressRanges
from tierfall.core.tensors.wrappers import inner_tensors
from tierfall.core.types.text import format_some

_KEEPS_ORDER = (DataLoader, Dataset, Sampler, torch.Generator)
_LEAVES = frozenset({int, float, str, bool, bytes, type(None)})


def omissions(state: Mapping[Any, object]) -> Iterator[str]:
    """One message for each omission in a state that can be saved."""
    yield from _classes_of_the_script(state)
    for trail, value in _entries(state, None):
        if keys := lost_entries(value):
            yield (
                f"save: {names.path(trail)} is the state_dict() of a module, and not the module's memory in "
                f"{format_some([*map(repr, keys)])}, which restore() refuses to fill: put the module itself there"
            )
        if (kind := state_dict_of(value)) is not None:
            yield (
                f"save: {names.path(trail)} is the state_dict() of {kind}, which restore() refuses to fill: put the "
                "object itself into the state, or read the checkpoint with tierfall.load() and call load_state_dict()"
            )
    keeping = [value for _, value in _entries(state, None) if _keeps_order(value)]
    if any(not isinstance(value, torch.Generator) for value in keeping):
        return
    shuffling = [loader for loader in _loaders() if _generators(loader)]
    # The order of an epoch is drawn as it begins: a generator that a loader draws from does not lead back into it.
    drawn_from = {id(generator) for loader in shuffling for generator in _generators(loader)}
    if shuffling and {id(value) for value in keeping} <= drawn_from:
        yield (
            "save: a DataLoader of this process shuffles, and the state holds neither a loader or sampler that knows "
            "its position, nor a generator as it was when the epoch began: a run that is restored within an epoch goes "
            "on with other batches. Put a StatefulDataLoader into the state, or the state of the DataLoader's "
            "generator as it was when the epoch began, and skip the batches that were read; "
            'see "Exact resume", https://github.com/tierfall/tierfall/blob/main/docs/exact-resume.md'
        )


def unsaved_parameters(state: Mapping[Any, object], view: StateView) -> Iterator[str]:
    """One message for each optimizer that steps a parameter which is not in ``view``, what is saved of the state."""
    saved = AddressRanges(AddressRange.of(each) for each in view.sources if each.numel())
    for trail, value in _entries(state, None):
        groups = value.param_groups if isinstance(value, Optimizer) else []
        unsaved = [
            f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}"
            for number, group in enumerate(groups)
            for place, parameter in enumerate(group["params"])
            if parameter.requires_grad
            and id(parameter) not in view.parameters
            and not all(map(saved.contains, _memory_of(parameter)))
        ]
        if unsaved:
            yield (
                f"save: {names.path(trail)} steps what no entry of the state holds: {format_some(unsaved)}. A restore "
                "brings back the optimizer's state of it, and not its value: put it, or its module, into the state"
            )


def _memory_of(parameter: torch.Tensor) -> Iterator[AddressRange]:
    for local in map(local_tensor, inner_tensors(parameter)):
        if tensors.refusal(local) is None and local.numel():
            yield AddressRange.of(local)


def _classes_of_the_script(state: Mapping[Any, object]) -> Iterator[str]:
    found: dict[type, Trail] = {}
    for trail, value in _entries(state, None):
        if is_of_script(type(value)) and not is_stateful(value):
            found.setdefault(type(value), trail)
    script = name_of_script()
    for kind, trail in found.items():
        yield (
            f"save: {names.path(trail)} is of a class of this script, {kind.__qualname__}: another program gets a "
            f"tierfall.UnknownValue in its place, unless it imports {script or 'a module that has the class'}. Define "
            "the class in a module of its own"
        )


def _entries(value: Any, trail: Trail) -> Iterator[tuple[Trail, object]]:
    """Yield the non-leaf entries of plain containers, at any depth, with their trails."""
    for key, child in value.items() if trail is None else value_codec.children(value):
        if type(child) not in _LEAVES:
            yield (trail, key), unwrap(child)
            yield from _entries(unwrap(child), (trail, key))


def _keeps_order(value: object) -> bool:
    """Whether an entry may record the training's position in its data."""
    if isinstance(value, torch.Tensor):  # a generator's get_state()
        return value.dtype is torch.uint8 and value.shape == torch.get_rng_state().shape
    if isinstance(value, _KEEPS_ORDER):
        return True
    if not is_stateful(value) or isinstance(value, nn.Module | Optimizer):
        return False
    return any(isinstance(each, _KEEPS_ORDER) for each in getattr(value, "__dict__", {}).values())


def _loaders() -> Iterator[DataLoader[Any]]:
    """Yield the DataLoaders of this process. The search takes 20 ms or more, growing with the number of objects."""
    kinds: list[Any] = [DataLoader]
    for kind in kinds:  # grows during the loop
        kinds += kind.__subclasses__()
    yield from (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _generators(loader: DataLoader[Any]) -> list[object]:
    """The generators that a loader's order depends on; None for the process's. Empty where it does not shuffle, and
    where its order follows from a seed and the epoch that ``set_epoch`` names."""
    batches = loader.__dict__.get("batch_sampler")
    within = getattr(batches, "__dict__", {}).get("sampler")
    used = [loader.__dict__.get("sampler")] if batches is None else [batches, within]
    attributes = [getattr(s, "__dict__", {}) for s in used if not hasattr(s, "set_epoch")]
    return [each["generator"] for each in attributes if "generator" in each]
