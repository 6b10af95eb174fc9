"""What a module tells about its state_dict: which keys are parameters, and their names without wrappers.

DDP, DataParallel, compiled modules and torch's activation checkpointing prefix each name in what they wrap. The prefix
is taken off by the module's type, at any depth; a child that happens to be called ``module`` keeps its name.
"""

from __future__ import annotations

import bisect
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from tierfall.core.state.item import Item
from tierfall.core.state.view import NO_OWNER
from tierfall.core.tensors import names as naming
from tierfall.core.tensors import tensors, value_codec
from tierfall.core.tensors.dtensor import local_tensor

EXTRA_STATE = "_extra_state"
_CHECKPOINTED = "_checkpoint_wrapped_module."
_TREE_MODULES_MAX = 1 << 20
"""A module tree of more is one that contains itself."""


@dataclass(slots=True)
class ModuleScan:
    """One module's own view of its state_dict keys: what they mean, and their names without wrappers. ``places`` are
    its modules, each with the prefix of its keys and what is left of that without wrappers."""

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    places: list[tuple[str, str, nn.Module]] = field(default_factory=list)
    has_wrappers: bool = False
    refused: str | None = None
    """Why the module, or one in it, can be neither saved nor restored."""
    _pointers: dict[int, str] | None = None
    _bare: dict[str, str] | None = None
    _raw: dict[str, str] | None = None
    _owners: dict[str, nn.Module] | None = None
    _extents: list[tuple[int, int, str]] | None = None
    _kinds: dict[type[nn.Module], str | None] = field(default_factory=dict)

    def visit(self, module: nn.Module, raw: str, bare: str) -> None:
        """Take in a module, whose keys begin with ``raw``, and all below it."""
        self.places.append((raw, bare, module))
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
        """Name a key of the state_dict, below the module's own name."""
        return naming.module_part(self._strip(key) if self.has_wrappers else key)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, each with its name in the state."""
        names: Iterable[str] = self.parameters
        if self.has_wrappers:
            names = map(self._strip, names)
        prefix = f"{self.name}." if self.name else ""
        names = map(prefix.__add__, naming.module_parts(names))
        return zip(names, self.parameters.values(), strict=True)

    @property
    def owners(self) -> dict[str, nn.Module]:
        """The modules, by the key that each one's extra state would have."""
        if self._owners is None:
            self._owners = {raw + EXTRA_STATE: module for raw, _, module in self.places}
        return self._owners

    def _strip(self, key: str) -> str:
        if self._bare is None:
            # Activation checkpointing takes its prefix off the keys, and leaves those of other wrappers within.
            self._bare = {raw.replace(_CHECKPOINTED, ""): bare for raw, bare, _ in self.places}
            self._bare.update({raw: bare for raw, bare, _ in self.places})
        prefix, dot, leaf = key.rpartition(".")
        while dot and prefix + "." not in self._bare:
            # A key that a hook made up: strip what is known of it.
            prefix, dot, more = prefix.rpartition(".")
            leaf = f"{more}.{leaf}"
        return (self._bare[prefix + "."] if dot else self._bare.get("", "")) + leaf

    def parameter_of(self, key: str, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the parameter whose memory a tensor of the state_dict is."""
        found = self._named(key)
        owner = self.parameters.get(found)
        if owner is not None and _address(owner) == _address(tensor):
            return owner
        found_key = self._by_pointer(tensor)
        return None if found_key is None else self.parameters.get(found_key)

    def owners_of(self, state: Mapping[str, object]) -> list[int]:
        """Return for each entry of the state_dict the id of the parameter that its memory is, or is a part of, or
        NO_OWNER."""
        owners = []
        for key, value in state.items():
            found = None
            if isinstance(value, torch.Tensor):
                found = self.parameter_of(key, value)
                found = self._whole_of(value) if found is None else found
            owners.append(NO_OWNER if found is None else id(found))
        return owners

    def _whole_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the parameter of which a tensor, as a hook makes it, is a view in part."""
        if not _address(tensor):
            return None
        if self._extents is None:
            self._extents = sorted(
                (*tensors.span(local), key)
                for key, each in self.parameters.items()
                if _address(each) and (local := local_tensor(each)).is_contiguous()
            )
        start, end = tensors.span(local_tensor(tensor))
        at = bisect.bisect_right(self._extents, start, key=itemgetter(0)) - 1
        if at < 0 or end > self._extents[at][1]:
            return None
        return self.parameters[self._extents[at][2]]

    def owner_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter or buffer whose memory a tensor of the state_dict is; None where it is a copy."""
        raw = self._named(key)
        found: torch.Tensor | None = self.parameters.get(raw)
        if found is None:
            found = self.buffers.get(raw)
        if found is not None and _address(found) == _address(tensor):
            return found
        found_key = self._by_pointer(tensor)
        if found_key is None:
            return None
        return self.parameters.get(found_key, self.buffers.get(found_key))

    def _named(self, key: str) -> str:
        """Return the name, with wrappers, of what a key of the state_dict without them means: a wrapper may take its
        own prefix off the keys, as activation checkpointing does."""
        if not self.has_wrappers or key in self.parameters or key in self.buffers:
            return key
        if self._raw is None:
            self._raw = {self._strip(raw): raw for raw in (*self.buffers, *self.parameters)}
        return self._raw.get(self._strip(key), key)

    def signature(self) -> tuple[Any, ...]:
        """Return what says which key of a state_dict is a parameter, and how it is named: equal for equal answers."""
        try:
            pointers = array("Q", map(torch.Tensor.data_ptr, self.parameters.values()))
        except (RuntimeError, ValueError):
            return (object(),)  # one of another layout, or of no shape yet, has no address
        bare = [(raw, bare) for raw, bare, _ in self.places] if self.has_wrappers else []
        return (tuple(self.parameters), pointers, bare)

    def _by_pointer(self, tensor: torch.Tensor) -> str | None:
        if self._pointers is None:
            self._pointers = {
                address: key
                for key, t in (*self.buffers.items(), *self.parameters.items())
                if (address := _address(t))
            }
        address = _address(tensor)
        return self._pointers.get(address) if address else None


def _address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins, of one that several ranks hold this rank's part; 0 where it has
    none, or is no plain tensor."""
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
    """Name the child whose prefix a wrapper of this kind puts before the names of what is in it."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrapper is not None and issubclass(kind, wrapper.ActivationWrapper):
        return _CHECKPOINTED[:-1]
    # A compiled module exists only where dynamo is loaded already; loading it costs seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and issubclass(kind, dynamo.OptimizedModule):
        return "_orig_mod"
    return None


def _refusal(kind: type[nn.Module]) -> str | None:
    """Say why modules of a class can be neither saved nor restored."""
    sharded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if sharded is not None and issubclass(kind, sharded.FullyShardedDataParallel):
        return (
            "is sharded by FullyShardedDataParallel (FSDP1), whose state_dict() gathers tensors by collectives of its "
            "own; shard it by torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return None


class ModuleTreeShape(NamedTuple):
    """All that decides which tensors of a module tree its ``state_dict`` returns under which keys, but the tensors."""

    modules: list[type[Any]]
    lengths: list[list[int]]
    keys: list[list[str]]
    tensors: list[type[Any]]
    not_persistent: list[frozenset[str]]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTree:
    """A module and all below it, whose ``state_dict`` is nn.Module's own at each of them, without hooks and extra
    state: its modules, its tensors (``parameters`` of them come first), and its shape."""

    shape: ModuleTreeShape
    modules: list[nn.Module]
    parameters: int
    tensors: list[torch.Tensor | None]


def tree_of(root: nn.Module) -> ModuleTree | None:
    """Return the tree of a module; None where something other than its tensors decides what its state_dict holds."""
    modules = [root]
    children: list[Any] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    not_persistent = []
    for module in modules:  # which grows meanwhile
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
    """Say whether modules of a class make their state_dict as nn.Module does."""
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModuleTree:
    """What was found out about a tree of a certain shape: the names of its ``parameters``, and where each is among the
    tree's tensors (``parameters_at``); where the entries of its state_dict are there, in that one's order, and which of
    these are ``buffers``; and by what rule of the user's its tensors were taken (``ruled``)."""

    shape: ModuleTreeShape
    parameters: tuple[str, ...]
    parameters_at: tuple[int, ...]
    entries_at: tuple[int, ...]
    buffers: tuple[int, ...]
    ruled: object


def know(
    scan: ModuleScan, tree: ModuleTree, keys: Sequence[str], ruled: object
) -> KnownModuleTree | None:
    """Note what was found out about a tree by a scan and a state_dict; None where the tree does not have all of its
    entries."""
    starts: dict[int, tuple[int, int]] = {}
    parameters, buffers = 0, tree.parameters
    for module in tree.modules:
        starts.setdefault(id(module), (parameters, buffers))
        parameters += len(module._parameters)
        buffers += len(module._buffers)
    at: dict[str, int] = {}
    for raw, _, module in scan.places:
        first_parameter, first_buffer = starts[id(module)]
        at.update({raw + name: first_parameter + n for n, name in enumerate(module._parameters)})
        at.update({raw + name: first_buffer + n for n, name in enumerate(module._buffers)})
    if not at.keys() >= set(keys):
        return None
    entries_at = tuple(at[key] for key in keys)
    return KnownModuleTree(
        shape=tree.shape,
        parameters=tuple(name for name, _ in scan.named_parameters()),
        parameters_at=tuple(at[raw] for raw in scan.parameters),
        entries_at=entries_at,
        buffers=tuple(n for n, place in enumerate(entries_at) if place >= tree.parameters),
        ruled=ruled,
    )


@dataclass(slots=True)
class Scans:
    """Every module of a state, looked at once before the walk, and the name of every parameter.

    ``trees`` are those whose shape says all about their state_dict, by the module's id: the name that it stands at, the
    tree, and what is known of its shape.
    """

    by_module: dict[int, ModuleScan] = field(default_factory=dict)
    trees: dict[int, tuple[str, ModuleTree, KnownModuleTree | None]] = field(default_factory=dict)
    parameters: dict[int, tuple[str, nn.Parameter]] = field(default_factory=dict)

    def of(self, module: nn.Module, name: str) -> ModuleScan:
        """Return the scan of a module at ``name``; one module may stand at several."""
        found = self.by_module.get(id(module))
        return found if found is not None and found.name == name else scan(module, name)

    def tree(
        self, module: nn.Module, name: str
    ) -> tuple[ModuleTree | None, KnownModuleTree | None]:
        """Return the tree of a module that was first met at ``name``, and what is known of its shape."""
        at, tree, known = self.trees.get(id(module), ("", None, None))
        return (tree, known) if at == name else (None, None)

    def add(self, module: nn.Module, name: str, known: Mapping[str, KnownModuleTree]) -> None:
        """Take in a module that stands at ``name``."""
        tree = tree_of(module)
        if tree is not None:
            before = known.get(name)
            if before is not None and before.shape != tree.shape:
                before = None
            self.trees[id(module)] = (name, tree, before)
            if before is not None:
                parameters = [tree.tensors[at] for at in before.parameters_at]
                self._note([*zip(before.parameters, parameters, strict=True)])
                return
        found = self.by_module[id(module)] = scan(module, name)
        self._note([*found.named_parameters()])

    def _note(self, named: list[tuple[str, Any]]) -> None:
        """Take the parameters of a module in; one that has a name keeps it."""
        ids = [id(parameter) for _, parameter in named]
        found = dict(zip(ids, named, strict=True))
        if len(found) < len(ids):
            found.update(zip(reversed(ids), reversed(named), strict=True))
        if not self.parameters:
            self.parameters = found
            return
        for each in found.keys() & self.parameters.keys():
            del found[each]
        self.parameters.update(found)


def scan_state(
    state: Mapping[object, object], known: Mapping[str, KnownModuleTree] | None = None
) -> Scans:
    """Look at all modules and bare parameters of a state. Looks through plain containers only, and never calls anything
    of the user's. ``known`` is what earlier walks found out, by name."""
    scans = Scans()
    for key, value in state.items():
        _find(value, naming.part(key) if _may_name(key) else "", scans, known or {}, 0)
    return scans


def _find(
    value: object, name: str, scans: Scans, known: Mapping[str, KnownModuleTree], depth: int
) -> None:
    kind = type(value)
    if kind is Item:
        _find(value.value, name, scans, known, depth)  # type: ignore[attr-defined]
    elif isinstance(value, nn.Module) and value_codec.codec_for(kind) is None:
        if id(value) not in scans.by_module and id(value) not in scans.trees:
            scans.add(value, name, known)
    elif kind is nn.Parameter:
        scans.parameters.setdefault(id(value), (name, value))  # type: ignore[arg-type]
    elif depth <= value_codec.DEPTH_MAX:
        for child_name, child in _children(value, name):
            _find(child, child_name, scans, known, depth + 1)


def _children(value: object, name: str) -> Iterator[tuple[str, object]]:
    if type(value) in value_codec.MAPPINGS:
        for key, child in value.items():  # type: ignore[attr-defined]
            if type(child) not in _LEAVES and _may_name(key):
                yield naming.join(name, naming.part(key)), child
    elif type(value) is list or type(value) is tuple:
        for index, child in enumerate(value):
            if type(child) not in _LEAVES:
                yield f"{name}.{index}", child


def _may_name(key: object) -> bool:
    try:
        naming.part(key)
    except value_codec.NotEncodableError:
        return False  # the walk refuses it, with its path
    return True


_LEAVES = frozenset({int, float, str, bool, bytes, type(None), torch.Tensor})
