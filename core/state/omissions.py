"""What a state lacks for a run to go on from it as it was. Said at a save: a restart shows it too late.

Looked for are: a state_dict() in place of its object, which restore() refuses, in whole or in part; and a DataLoader
that shuffles, of whose order the state holds nothing.
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
from tierfall.core.state.state_dicts import lost_entries, state_dict_of
from tierfall.core.state.walk import is_stateful
from tierfall.core.tensors import names, value_codec
from tierfall.core.tensors.names import Trail
from tierfall.core.types.text import few_of

_KEEPS_ORDER = (DataLoader, Dataset, Sampler, torch.Generator)
_LEAVES = frozenset({int, float, str, bool, bytes, type(None)})


def omissions(state: Mapping[Any, object]) -> Iterator[str]:
    """Say what a state lacks, one text for each thing. The state is one that could be saved."""
    for trail, value in _entries(state, None):
        if lost := lost_entries(value):
            yield (
                f"save: {names.path(trail)} is the state_dict() of a module, and not the module's memory in "
                f"{few_of([*map(repr, lost)])}, which restore() refuses to fill: put the module itself into the state"
            )
        if (kind := state_dict_of(value)) is not None:
            yield (
                f"save: {names.path(trail)} is the state_dict() of {kind}, which restore() refuses to fill: put the "
                "object itself into the state, or read the checkpoint by tierfall.load() and call load_state_dict()"
            )
    keeps_order = any(_keeps_order(value) for _, value in _entries(state, None))
    if not keeps_order and any(map(_shuffles, _loaders())):
        yield (
            "save: a DataLoader of this process shuffles, and the state holds no loader, sampler or generator: a run "
            "that is restored within an epoch goes on with other batches. Put a StatefulDataLoader, or the generator "
            'of the DataLoader, into the state; see "Exact resume", docs/exact-resume.md'
        )


def _entries(value: Any, trail: Trail) -> Iterator[tuple[Trail, object]]:
    """Yield what stands in plain containers, these too, each with its place."""
    if trail is None or type(value) in value_codec.MAPPINGS:
        children = value.items()
    else:
        children = enumerate(value) if type(value) in (list, tuple) else ()
    for key, child in children:
        if type(child) not in _LEAVES:
            yield (trail, key), unwrap(child)
            yield from _entries(unwrap(child), (trail, key))


def _keeps_order(value: object) -> bool:
    """Say whether an entry may tell where in its data a training is."""
    if isinstance(value, torch.Tensor):  # what get_state() of a generator returns
        return value.dtype is torch.uint8 and value.shape == torch.get_rng_state().shape
    if isinstance(value, _KEEPS_ORDER):
        return True
    if not is_stateful(value) or isinstance(value, nn.Module | Optimizer):
        return False
    return any(isinstance(held, _KEEPS_ORDER) for held in getattr(value, "__dict__", {}).values())


def _loaders() -> Iterator[DataLoader[Any]]:
    """Yield the DataLoaders of this process. The search takes 20 ms or more, by the number of all objects."""
    kinds: list[Any] = [DataLoader]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    yield from (found for found in gc.get_referrers(*kinds) if type(found) in kinds)


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Say whether a loader's order comes from a generator: one of its own, or that of the process."""
    batches = loader.__dict__.get("batch_sampler")
    within = getattr(batches, "__dict__", {}).get("sampler")
    samplers = loader.__dict__.get("sampler"), batches, within
    return any("generator" in getattr(sampler, "__dict__", {}) for sampler in samplers)
