"""What a module tells about its state_dict: which keys are parameters, and their names without wrappers.

DDP, DataParallel and compiled modules put a prefix before each key of what they wrap. It is taken off where a module of
that type stands, at any depth; a child that happens to be called ``module`` keeps its name.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tierfall.core.image import codec, naming
from tierfall.core.image.item import Item

EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class ModuleScan:
    """One module's own view of its state_dict keys: what the keys mean, and their names without wrappers.

    ``places`` are the modules in it, each with the prefix of its keys and what is left of that without wrappers.
    """

    name: str
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    places: list[tuple[str, str, nn.Module]] = field(default_factory=list)
    has_wrappers: bool = False
    _pointers: dict[int, str] | None = None
    _bare: dict[str, str] | None = None
    _owners: dict[str, nn.Module] | None = None
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
            self._bare = {raw: bare for raw, bare, _ in self.places}
        prefix, dot, leaf = key.rpartition(".")
        while dot and prefix + "." not in self._bare:
            # A key that a hook made up: strip what is known of it.
            prefix, dot, more = prefix.rpartition(".")
            leaf = f"{more}.{leaf}"
        return (self._bare[prefix + "."] if dot else self._bare.get("", "")) + leaf

    def parameter_of(self, key: str, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the parameter whose memory a tensor of the state_dict is."""
        found = self.parameters.get(key)
        if found is not None and found.data_ptr() == tensor.data_ptr():
            return found
        found_key = self._by_pointer(tensor)
        return None if found_key is None else self.parameters.get(found_key)

    def owner_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter or buffer whose memory a tensor of the state_dict is; None where it is a copy."""
        found: torch.Tensor | None = self.parameters.get(key)
        if found is None:
            found = self.buffers.get(key)
        if found is not None and found.data_ptr() == tensor.data_ptr():
            return found
        found_key = self._by_pointer(tensor)
        if found_key is None:
            return None
        return self.parameters.get(found_key, self.buffers.get(found_key))

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
            tensors: list[tuple[str, torch.Tensor]] = [
                *self.buffers.items(),
                *self.parameters.items(),
            ]
            self._pointers = {
                t.data_ptr(): key for key, t in tensors if t.layout is torch.strided and t.numel()
            }
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_nested
        ):
            return None
        return self._pointers.get(tensor.data_ptr()) if tensor.numel() else None


def scan(module: nn.Module, name: str) -> ModuleScan:
    result = ModuleScan(name)
    result.visit(module, "", "")
    return result


def _wrapped_child(kind: type[nn.Module]) -> str | None:
    """Name the child whose prefix a wrapper of this kind puts before its keys."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    # A compiled module exists only where dynamo is loaded already; loading it costs seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and issubclass(kind, dynamo.OptimizedModule):
        return "_orig_mod"
    return None


@dataclass(slots=True)
class Scans:
    """Every module of a state, scanned once before the walk, and the name of every parameter."""

    by_module: dict[int, ModuleScan] = field(default_factory=dict)
    parameters: dict[int, tuple[str, nn.Parameter]] = field(default_factory=dict)

    def of(self, module: nn.Module, name: str) -> ModuleScan:
        """Return the scan of a module at ``name``; one module may stand at several."""
        found = self.by_module.get(id(module))
        return found if found is not None and found.name == name else scan(module, name)

    def note(self, scan: ModuleScan) -> None:
        """Take the parameters of a module in; one that has a name keeps it."""
        ids = [*map(id, scan.parameters.values())]
        named = [*scan.named_parameters()]
        found = dict(zip(ids, named, strict=True))
        if len(found) < len(ids):
            found.update(zip(reversed(ids), reversed(named), strict=True))
        for each in found.keys() & self.parameters.keys():
            del found[each]
        self.parameters.update(found)


def scan_state(state: Mapping[object, object]) -> Scans:
    """Scan all modules and bare parameters of a state. Looks through plain containers only, and never calls anything of
    the user's."""
    scans = Scans()
    for key, value in state.items():
        _find(value, naming.part(key) if _may_name(key) else "", scans, 0)
    return scans


def _find(value: object, name: str, scans: Scans, depth: int) -> None:
    kind = type(value)
    if kind is Item:
        _find(value.value, name, scans, depth)  # type: ignore[attr-defined]
    elif isinstance(value, nn.Module) and codec.codec_for(kind) is None:
        if id(value) not in scans.by_module:
            found = scans.by_module[id(value)] = scan(value, name)
            scans.note(found)
    elif kind is nn.Parameter:
        scans.parameters.setdefault(id(value), (name, value))  # type: ignore[arg-type]
    elif depth <= codec.DEPTH_MAX:
        for child_name, child in _children(value, name):
            _find(child, child_name, scans, depth + 1)


def _children(value: object, name: str) -> Iterator[tuple[str, object]]:
    if type(value) in codec.MAPPINGS:
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
    except codec.Uncodable:
        return False  # the walk refuses it, with its path
    return True


_LEAVES = frozenset({int, float, str, bool, bytes, type(None), torch.Tensor})
