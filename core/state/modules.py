"""Scans of modules: which keys of a state_dict are parameters, and their names without wrappers.

DDP, DataParallel, compiled modules and torch's activation checkpointing add a prefix to the names of the module that
they wrap. The prefix is removed by the wrapper's type, at any depth; a child that happens to be named ``module`` keeps
its name.
"""

from __future__ import annotations

import bisect
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from operator import contains, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from tierfall.core.state.item import visit_state
from tierfall.core.state.view import NO_OWNER
from tierfall.core.tensors import builtin_codecs, tensors, value_codec, wrappers
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.dtensor import local_tensor

EXTRA_STATE = "_extra_state"
_CHECKPOINTED = "_checkpoint_wrapped_module."


@dataclass
class ModuleScan:
    """The keys of one module's state_dict: their parameters and buffers, and their names without wrappers.
    ``module_prefixes`` are the module and its descendants, each with the prefix of its keys, and that prefix without
    wrappers."""

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    module_prefixes: list[tuple[str, str, nn.Module]] = field(default_factory=list)
    has_wrappers: bool = False
    refused: str | None = None
    """Why the module, or a descendant, can be neither saved nor restored."""
    _kinds: dict[type[nn.Module], str | None] = field(default_factory=dict)

    def visit(self, module: nn.Module, raw: str, bare: str) -> None:
        """Add a module, whose keys begin with ``raw``, and its descendants; ``bare`` is ``raw`` without wrappers."""
        self.module_prefixes.append((raw, bare, module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.parameters[raw + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.buffers[raw + name] = buffer
        children = module._modules
        if not children:
            return
        kind = type(module)
        if kind not in self._kinds:
            self._kinds[kind] = _wrapped_child(kind)
            self.refused = self.refused or _refusal(kind)
        wrapped = self._kinds[kind]
        for name, child in children.items():
            if child is None:
                continue
            below = f"{raw}{name}."
            if name == wrapped:
                self.has_wrappers = True
                self.visit(child, below, bare)
            else:
                self.visit(child, below, below if raw == bare else f"{bare}{name}.")

    def key_name(self, key: str) -> str:
        """The name of a key of the state_dict, relative to the module's name."""
        return naming.module_part(self._strip(key) if self.has_wrappers else key)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names in the state."""
        for raw, parameter in self.parameters.items():
            yield naming.join(self.name, self.key_name(raw)), parameter

    def names_of_parameters(self) -> dict[int, str]:
        """The names of the parameters in the state, by id; of several names the first."""
        found: dict[int, str] = {}
        for name, parameter in self.named_parameters():
            found.setdefault(id(parameter), name)
        return found

    @cached_property
    def by_extra_state_key(self) -> dict[str, nn.Module]:
        """The modules by the key of their extra state."""
        return {raw + EXTRA_STATE: module for raw, _, module in self.module_prefixes}

    @cached_property
    def _bare(self) -> dict[str, str]:
        """The prefixes without wrappers, by those with them."""
        # Activation checkpointing removes its own prefix from the keys, but not those of wrappers inside it.
        bare = {raw.replace(_CHECKPOINTED, ""): bare for raw, bare, _ in self.module_prefixes}
        return bare | {raw: bare for raw, bare, _ in self.module_prefixes}

    def _strip(self, key: str) -> str:
        prefix, dot, leaf = key.rpartition(".")
        while dot and prefix + "." not in self._bare:
            # A key that a hook added: strip its longest known prefix.
            prefix, dot, more = prefix.rpartition(".")
            leaf = f"{more}.{leaf}"
        return (self._bare[prefix + "."] if dot else self._bare.get("", "")) + leaf

    def owners_of(self, state: Mapping[str, object]) -> list[int]:
        """For each entry of the state_dict, the id of the parameter whose memory it shares, in whole or part, or
        NO_OWNER."""
        owners = []
        for key, value in state.items():
            found = None
            if isinstance(value, torch.Tensor):
                found = self.owner_of(key, value)
                if not isinstance(found, nn.Parameter):
                    found = self._containing_parameter(value)
            owners.append(NO_OWNER if found is None else id(found))
        return owners

    def _containing_parameter(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter that contains a tensor's memory, as with views that hooks create."""
        if not _address(tensor):
            return None
        start, end = tensors.span(local_tensor(tensor))
        at = bisect.bisect_right(self._extents, start, key=itemgetter(0)) - 1
        if at < 0 or end > self._extents[at][1]:
            return None
        return self.parameters[self._extents[at][2]]

    @cached_property
    def _extents(self) -> list[tuple[int, int, str]]:
        return sorted(
            (*tensors.span(local), key)
            for key, each in self.parameters.items()
            if _address(each) and (local := local_tensor(each)).is_contiguous()
        )

    def owner_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter or buffer that shares the memory of a state_dict's tensor; None if it is a copy."""
        raw = self._raw_key(key)
        found: torch.Tensor | None = self.parameters.get(raw)
        if found is None:
            found = self.buffers.get(raw)
        if found is not None and _is_same_memory(found, tensor):
            return found
        return self._by_pointer.get(_address(tensor))

    def _raw_key(self, key: str) -> str:
        """The key with the prefixes of wrappers, some of which, such as activation checkpointing, remove theirs."""
        if not self.has_wrappers or key in self.parameters or key in self.buffers:
            return key
        return self._raw.get(self._strip(key), key)

    @cached_property
    def _raw(self) -> dict[str, str]:
        return {self._strip(raw): raw for raw in (*self.buffers, *self.parameters)}

    def signature(self) -> tuple[Any, ...]:
        """A value that changes whenever a key's parameter, or its name, changes."""
        try:
            pointers = array("Q", map(torch.Tensor.data_ptr, self.parameters.values()))
        except (RuntimeError, ValueError):
            return (object(),)  # a sparse or uninitialized parameter has no address: never equal
        bare = [(raw, bare) for raw, bare, _ in self.module_prefixes] if self.has_wrappers else []
        return (tuple(self.parameters), pointers, bare)

    @cached_property
    def _by_pointer(self) -> dict[int, torch.Tensor]:
        """The buffers and parameters that have memory, by its address."""
        both = (*self.buffers.values(), *self.parameters.values())
        return {address: each for each in both if (address := _address(each))}


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    address = _address(one)
    if address or not wrappers.is_wrapper(one):
        return address == _address(other)
    addresses = [[*map(_address, wrappers.inner_tensors(each))] for each in (one, other)]
    return addresses[0] == addresses[1]


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor, or of this rank's part of a DTensor; 0 if it has no memory or is not plain."""
    tensor = local_tensor(tensor)
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return 0
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return 0
    return tensor.data_ptr()


def scan(module: nn.Module, name: str) -> ModuleScan:
    result = ModuleScan(name)
    result.visit(module, "", "")
    return result


def _wrapped_child(kind: type[nn.Module]) -> str | None:
    """The name of the child that a wrapper of this class wraps, and whose name it adds as a prefix."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrapper is not None and issubclass(kind, wrapper.ActivationWrapper):
        return _CHECKPOINTED[:-1]
    # A compiled module exists only if dynamo is loaded; importing it would take seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and issubclass(kind, dynamo.OptimizedModule):
        return "_orig_mod"
    return None


def _refusal(kind: type[nn.Module]) -> str | None:
    """The reason why modules of a class can be neither saved nor restored, or None."""
    sharded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if sharded is not None and issubclass(kind, sharded.FullyShardedDataParallel):
        return (
            "is sharded by FullyShardedDataParallel (FSDP1), whose state_dict() gathers tensors by collectives of its "
            "own; shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return None


def describe_tree(
    scan: ModuleScan, tree: ModuleTree, keys: Sequence[str], declared: object
) -> KnownModuleTree | None:
    """Describe a tree by its scan and the ``keys`` of its state_dict; None if the tree does not contain all of them."""
    starts: dict[int, tuple[int, int]] = {}
    parameters, buffers = 0, tree.parameters
    for module in tree.modules:
        starts.setdefault(id(module), (parameters, buffers))
        parameters += len(module._parameters)
        buffers += len(module._buffers)
    at: dict[str, int] = {}
    for raw, _, module in scan.module_prefixes:
        first_parameter, first_buffer = starts[id(module)]
        at.update({raw + name: first_parameter + n for n, name in enumerate(module._parameters)})
        at.update({raw + name: first_buffer + n for n, name in enumerate(module._buffers)})
    if not at.keys() >= set(keys):
        return None
    return KnownModuleTree(
        shape=tree.shape,
        parameters=scan.names_of_parameters(),
        entries_at=tuple(at[key] for key in keys),
        declared=declared,
    )


@dataclass(slots=True)
class Scans:
    """The scans of all modules of a state, made before the walk.

    ``trees`` maps a module's id to its first name in the state, its tree, and the tree's description, if known.
    ``parameters`` are the names of all parameters by id, never changed in place; ``live`` are the parameters, some of
    them twice, and None for those that a module lacks.
    """

    by_module: dict[int, ModuleScan] = field(default_factory=dict)
    trees: dict[int, tuple[str, ModuleTree, KnownModuleTree | None]] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    live: list[Any] = field(default_factory=list)

    def of(self, module: nn.Module, name: str) -> ModuleScan:
        """The scan of a module at ``name``; a module may have several names."""
        found = self.by_module.get(id(module))
        return found if found is not None and found.name == name else scan(module, name)

    def tree(
        self, module: nn.Module, name: str
    ) -> tuple[ModuleTree | None, KnownModuleTree | None]:
        """The tree of a module whose first name is ``name``, and its description."""
        at, tree, known = self.trees.get(id(module), ("", None, None))
        return (tree, known) if at == name else (None, None)

    def add(
        self, module: nn.Module, name: str, known: Mapping[str, KnownModuleTree | None]
    ) -> None:
        """Add the module at ``name``."""
        tree = tree_of(module)
        if tree is not None:
            before = known.get(name)
            if before is not None and before.shape != tree.shape:
                before = None
            self.trees[id(module)] = (name, tree, before)
            if before is not None:
                self.add_parameters(before.parameters, tree.tensors[: tree.parameters])
                return
        found = self.by_module[id(module)] = scan(module, name)
        self.add_parameters(found.names_of_parameters(), found.parameters.values())

    def add_parameters(self, names: dict[int, str], live: Iterable[Any]) -> None:
        """Add parameters, with their names by id; one that already has a name keeps it."""
        self.live += live
        self.parameters = self.parameters | names | self.parameters if self.parameters else names


def scan_state(
    state: Mapping[object, object], known: Mapping[str, KnownModuleTree | None] | None = None
) -> Scans:
    """Scan all modules and bare parameters of a state. Descends into plain containers only, and calls no user code.
    ``known`` has the tree descriptions of earlier walks, by name."""
    scans = Scans()
    for key, entry in state.items():
        try:
            top = naming.component(key)
        except builtin_codecs.NotEncodableError:
            top = ""  # the walk refuses it, with its path
        for name, value in visit_state(entry, top, without=_LEAVES):
            kind = type(value)
            if isinstance(value, nn.Module) and value_codec.codec_for(kind) is None:
                if id(value) not in scans.by_module and id(value) not in scans.trees:
                    scans.add(value, name, known or {})
            elif kind is nn.Parameter or (
                isinstance(value, nn.Parameter) and wrappers.is_wrapper(value)
            ):
                scans.add_parameters({id(value): name}, [value])
    return scans


_LEAVES = frozenset({int, float, str, bool, bytes, type(None), torch.Tensor})


# Trees that depend on nothing but their tensors ---------------------------------------------------


_TREE_MODULES_MAX = 1 << 20
"""A tree with more modules contains itself."""


class ModuleTreeShape(NamedTuple):
    """Everything but the tensors' memory that determines the entries of a module tree's ``state_dict``: ``tensors`` are
    the types of the tensors, ``ids`` their ids."""

    modules: list[type[Any]]
    lengths: list[list[int]]
    keys: list[list[str]]
    tensors: list[type[Any]]
    ids: list[int]
    not_persistent: dict[int, frozenset[str]]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """A module and its descendants, all with the ``state_dict`` of nn.Module and without hooks or extra state. In
    ``tensors``, the first ``parameters`` are parameters, the others buffers."""

    shape: ModuleTreeShape
    modules: list[nn.Module]
    parameters: int
    tensors: list[torch.Tensor | None]


def tree_of(root: nn.Module) -> ModuleTree | None:
    """The tree of a module; None if anything but its tensors determines its state_dict. Level by level, each attribute
    of all modules of a level by one call: a loop over modules would take a microsecond for each. Most tables are empty,
    and left out early."""
    modules, level = [root], [root]
    read: list[tuple[Any, ...]] = []
    try:
        while level and len(modules) <= _TREE_MODULES_MAX:
            own = [*map(vars, level)]
            if any(any(map(contains, own, repeat(method))) for method in _METHODS):
                return None
            found = [*map(_ATTRIBUTES, own)]
            below = chain.from_iterable(map(dict.values, filter(None, map(itemgetter(0), found))))
            level = [child for child in below if child is not None]
            modules += level
            read += found
        children, parameters, buffers, hooks, pre_hooks, hidden = zip(*read, strict=True)
        tables = (children, parameters, buffers)
        kinds = [*map(type, modules)]
        if level or any(hooks) or any(pre_hooks) or not all(map(_is_stock, set(kinds))):
            return None
        if set(map(type, chain(*tables))) != {dict}:
            return None
    except (KeyError, TypeError):  # a module without these attributes
        return None
    tensors: list[torch.Tensor | None] = [*chain.from_iterable(map(dict.values, parameters))]
    count = len(tensors)
    tensors += chain.from_iterable(map(dict.values, filter(None, buffers)))
    types = [*map(type, tensors)]
    if not set(types) <= _PLAIN_KINDS:
        return None
    shape = ModuleTreeShape(
        kinds,
        [[*map(len, table)] for table in tables],
        [[*chain.from_iterable(filter(None, table))] for table in tables],
        types,
        [*map(id, tensors)],
        {at: frozenset(names) for at, names in enumerate(hidden) if names},
    )
    return ModuleTree(shape, modules, count, tensors)


_METHODS = ("state_dict", "_save_to_state_dict")
_ATTRIBUTES = itemgetter(
    "_modules",
    "_parameters",
    "_buffers",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
)
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
    """The state_dict of a tree of some shape: ``entries_at`` are the indices of its entries in the tree's tensors, in
    its order. ``parameters`` are the names of the parameters by id; ``declared`` is the ``changes`` of the ``item()``
    around the module."""

    shape: ModuleTreeShape
    parameters: dict[int, str]
    entries_at: tuple[int, ...]
    declared: object
