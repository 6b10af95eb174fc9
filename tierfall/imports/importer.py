"""Import: what another program saved, or tierfall exported, becomes a step of a run, on all of its stored tiers.

It has an attempt of its own, as a start of a trainer has. The image is written to the first stored tier without host
memory, from mapped files or, of DCP, one tensor at a time; the other tiers get a copy (``ops/sync.py``). Before the
commit record nothing counts.

Of what other programs saved, a dict whose values are all tensors becomes a module, and a dict that an optimizer, a
scheduler or a scaler returned becomes that, so that a restore fills the object. Classes are unknown, so a restore
compares none.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.config import Config
from tierfall.core.copies.image_writes import Load, write_view
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.image.layout import plan_layout
from tierfall.core.state.state_dicts import state_dict_of
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors import names
from tierfall.core.types.errors import CaptureError, ConfigError, StepError, TierfallError
from tierfall.core.types.keys import STEP_MAX
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, ExportFormat, Shard
from tierfall.export.structure import CARRIED
from tierfall.imports.dcp_files import DcpFolder
from tierfall.imports.own_exports import read_image, read_own_dcp, read_own_torch
from tierfall.imports.sources import find_source, read_safetensors, read_torch
from tierfall.ops.commands import (
    check_room,
    owned_tiers,
    trained_elsewhere,
    unread,
    view_of,
)
from tierfall.ops.reader import RunReader
from tierfall.ops.sync import commit_copy, copy, open_writable
from tierfall.run.saver import SavingLineage
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.places import seen_by_one
from tierfall.setup.start import take_attempt
from tierfall.telemetry.progress import Progress, Watch

logger = logging.getLogger("tierfall")
_MODEL = "model"
"""The entry of the state that a bare state_dict becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadState:
    """What was read of a source: its state, and how the bytes of a tensor of ``view`` are found. ``is_stale``: another
    program has saved into the folder of an export."""

    format: ExportFormat
    entries: tuple[str, ...]
    stripped: int
    view: StateView
    load: Load
    is_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What was imported: the entries of the state, and the stored tiers that have it; ``left`` do not have it yet."""

    id: CheckpointId
    format: ExportFormat
    entries: tuple[str, ...]
    tensors: int
    bytes: int
    tiers: tuple[str, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...]


def read_state(path: Path, entry: str | None = None) -> ReadState:
    """Read a checkpoint of another program, or an export; ``entry`` is the name in the state of a bare state_dict, or
    of the only part that was exported.

    No tensor is read yet. Raises ConfigError for what cannot be imported, IntegrityError for damage, CaptureError for
    what no state may hold.
    """
    source = find_source(path)
    found: Mapping[Any, Any] | None = None
    load: Load = lambda tensor: tensor  # noqa: E731
    match source.format:
        case ExportFormat.SAFETENSORS:
            found = read_safetensors(source)
            own = None if found is not None else read_image(source.path, entry)
        case ExportFormat.TORCH:
            own = read_own_torch(source.path, entry)
            found = None if own is not None else read_torch(source.path)
        case ExportFormat.DCP:
            folder = DcpFolder(source.path)
            load = folder.load
            own = read_own_dcp(source.path, folder, entry)
            found = None if own is not None else folder.state()
    if own is not None:
        entries = tuple(names.component(key) for key in own.tree[2])
        return ReadState(format=source.format, entries=entries, stripped=0, view=own, load=load)
    if not found:
        raise ConfigError(f"import: {path} is empty: it has no tensor and no value")
    state = ImportedState()
    try:
        state.add({entry or _MODEL: found} if is_module(found) else found)
        view = state.view()
    except RecursionError as error:
        raise ConfigError(
            f"import: {path} holds a container that is nested too deep, or contains itself"
        ) from error
    except CaptureError as error:
        raise CaptureError(f"import: {path}: {str(error).removeprefix('save: ')}") from error
    return ReadState(
        format=source.format,
        entries=tuple(state.entries),
        stripped=state.stripped,
        view=view,
        load=load,
        is_stale=source.format is ExportFormat.DCP and (source.path / CARRIED).exists(),
    )


def check_step(listings: Sequence[Listing], step: int, run: str, stores: Mapping[str, Any]) -> None:
    """Raise StepError unless ``step`` may follow what the tiers hold of a run, and no trainer of another node may be
    alive."""
    if not 0 <= step <= STEP_MAX:
        raise StepError(f"import: step {step} is not from 0 to {STEP_MAX}")
    if silent := unread(listings):
        reasons = "; ".join(str(error) for error in silent.values())
        raise StepError(
            f"import: {', '.join(silent)} could not be read, and may hold step {step} or a newer one; nothing was "
            f"imported: {reasons}"
        )
    live = [c.id for c in merge(listings) if not c.abandoned]
    newest = max(live, default=None)
    if newest is not None and newest.step >= step:
        there = "has it already" if newest.step == step else f"has the newer step {newest}"
        raise StepError(
            f"import: step {step} of run {run!r}: the run {there}; name a step above {newest.step}, or another run by "
            "--run"
        )
    elsewhere = trained_elsewhere(listings, stores)
    if elsewhere is not None:
        raise StepError(
            f"import: attempt {elsewhere.number} of run {run!r} was started on {elsewhere.node}; an import would end "
            f"its trainer, if that is alive. Run this on {elsewhere.node}, or import into another run by --run"
        )


def _check_memory(config: Config, listings: Sequence[Listing]) -> None:
    """Raise StepError if memory alone has a checkpoint that tiers are owed: once they have a newer step, nothing brings
    it there."""
    host = config.host.name
    view = view_of(config, merge(listings))
    alone = [c.id for c in view.live if c.owed and c.copies.keys() == {host}]
    if alone:
        raise StepError(
            f"import: {format_some([str(id) for id in alone])} of run {config.run!r} is in memory alone. Run 'tierfall "
            "drain' first, which brings it to the tiers, or 'tierfall drain --discard' to leave it behind"
        )


def import_state(
    config: Config, read: ReadState, step: int, watch: Watch = lambda done, total: None
) -> ImportResult:
    """Save what was read as ``step`` of the run, on every stored tier; ``watch`` gets bytes written, and in all.

    The folder of a tier that no run has used is created. Raises StepError as ``check_step`` does, ConfigError without a
    stored tier that may be written, CapacityError where one cannot hold it, LockError beside a trainer of this machine,
    and what reading the source raises. After an error nothing of the step counts. Once the first tier has it, it does:
    ``tierfall copy`` brings it to tiers that did not get it then.
    """
    config = seen_by_one(config)
    if not config.written:
        raise ConfigError("import: the configuration has no stored tier that may be written")
    names = [tier.name for tier in config.written]
    size = plan_layout(read.view).image_bytes
    with RunReader(config) as reader:
        listings = reader.list()
        check_step(listings, step, config.run, reader.stores)
        _check_memory(config, listings)
    for listing in [listing for listing in listings if listing.tier in names]:
        check_room(config, listing, size, doing="import to")
    done: list[str] = []

    def watch_one(count: int, total: int) -> None:
        watch(len(done) * size + min(count, size), len(names) * size)

    with owned_tiers(config, "tierfall import", begins=True) as tiers:
        _check_memory(config, tiers.listings)
        attempt = take_attempt(tiers).attempt
        assert attempt is not None, "the ranks of a command are one"
        check_step(tiers.listings, step, config.run, tiers.stores)  # by now
        first = next(tier.name for tier in tiers.config.written if tier.name in tiers.stores)
        tiers.stores[first].check_room(size)
        id = _write(tiers, attempt, first, read, step, Progress(watch_one, size).add)
        done.append(first)
    for tier in (name for name in names if name != first):
        try:
            copy(config, id, tier, watch_one)
        except TierfallError as error:
            logger.warning("import: %s is not on %s yet: %s", id, tier, error)
        else:
            done.append(tier)
    return ImportResult(
        id=id,
        format=read.format,
        entries=read.entries,
        tensors=len(read.view.names),
        bytes=size,
        tiers=tuple(name for name in names if name in done),
        left=tuple(name for name in names if name not in done),
        notes=_notes(read),
    )


def _write(
    tiers: OpenedTiers,
    attempt: Attempt,
    tier: str,
    read: ReadState,
    step: int,
    on_bytes: Callable[[int], None],
) -> CheckpointId:
    """Write what was read to one tier, as ``attempt``, and commit it as the next step of the run, which continues its
    newest live checkpoint. Raises StepError if the run may have one, and none was found."""
    lineage = SavingLineage(tiers.run, attempt, begun=tiers.finds_nothing())
    live = [c.commit for c in merge(tiers.listings) if c.live and c.commit is not None]
    if live:
        lineage.continue_from(live[-1], attempt)
    lineage.check_begun(step)
    commit = Commit(
        # at the end of a training all tiers get a step, whatever their flush rules are
        lineage=replace(lineage.next(step), at_end=True),
        world_size=1,
        files=(),
        nodes=(tiers.node,),
        wall_time_s=time.time(),
    )
    with open_writable(tiers.config, tier) as store:
        store.fence.check(attempt)
        files = write_view(
            store,
            read.view,
            commit,
            shard=Shard(0, 1),
            chunk_bytes=tiers.config.chunk_bytes,
            load=read.load,
            on_bytes=on_bytes,
        )
        commit_copy(commit, store, files, attempt=attempt)
        store.write_latest(commit.lineage.checkpoint)
    return commit.lineage.checkpoint


def _notes(read: ReadState) -> tuple[str, ...]:
    notes = []
    if read.is_stale:
        notes.append(
            f"another program has saved into this folder since tierfall export wrote it: {CARRIED} in it does not fit, "
            "and was not used"
        )
    if read.stripped:
        notes.append(
            f"removed the prefixes of wrappers (module., _orig_mod.) from {read.stripped} names; if the model has an "
            "attribute of that name and no wrapper, restore with rename={'model': 'model.module'}"
        )
    return tuple(notes)


# The state -----------------------------------------------------------------------------------------

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
