"""Restoring a module: its own tensors in place, other entries of its state_dict by ``load_state_dict``.

A state_dict hook may return keys that are copies or combinations of parameters. Values written into these would not
change the module. If one entry is such a copy, the module's ``load_state_dict`` is called with all entries, as its
hooks expect, and the result is compared with the stored values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from tierfall.core.image.tree import (
    TENSORS,
    ModuleNode,
    Node,
    QuantizedNode,
    TensorNode,
    WrapperNode,
)
from tierfall.core.load.build import CPU
from tierfall.core.load.plan import RestoreWork
from tierfall.core.tensors import names, wrappers
from tierfall.core.tensors.dtensor import (
    as_dtensor_like,
    is_sharded,
    local_tensor,
)
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.tensors import refusal, to_bytes
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import format_some

logger = logging.getLogger("tierfall")


class ModuleFiller:
    """Plans one module as part of a restore."""

    def __init__(
        self, work: RestoreWork, node: ModuleNode, live: nn.Module, name: str, trail: Trail
    ) -> None:
        self._work = work
        self._node = node
        self._live = live
        self._name = name
        self._trail = trail
        self._scan = work.scans.of(live, name)
        self._in_place: list[str] = []
        self._rest: dict[str, Callable[[], object]] = {}

    def plan(self) -> None:
        work, scan = self._work, self._scan
        if scan.refused is not None:
            work.report.refuses(self._name, scan.refused)
            return
        state = self._state_dict()
        keys = {scan.key_name(key): key for key in state}
        if work.report.strict and self._differs_by_prefix(keys):
            return
        for _, below, child in self._node.entries:
            full = f"{self._name}.{below}"
            key = keys.pop(below, None)
            if not work.choices.has(full):
                continue
            if key is None:
                work.absent(child, full)
            else:
                self._entry(key, state[key], child, full)
        for below, key in keys.items():
            full = f"{self._name}.{below}"
            if work.choices.has(full):
                work.extra(state[key], full, is_object=key in scan.by_extra_state_key)
        if self._rest or self._has_own_load():
            work.state_loads.append(lambda: self._load(tuple(state)))
        else:
            work.state_loads.append(self._after_load)

    def _differs_by_prefix(self, keys: Collection[str]) -> bool:
        """Return whether all names of one side, and of that alone, begin with one prefix; report it where they do."""
        name, stored, live = self._name, sorted(n for _, n, _ in self._node.entries), sorted(keys)
        if len(stored) != len(live) or not set(stored).isdisjoint(live):
            return False
        if not all(self._work.choices.has(f"{name}.{each}") for each in stored):
            return False
        for what, longer, shorter, before, after in (
            ("in the state, and not in the checkpoint", live, stored, name, f"{name}.{{}}"),
            ("in the checkpoint, and not in the state", stored, live, f"{name}.{{}}", name),
        ):
            prefix = longer[0].removesuffix(shorter[0]) if longer else ""
            if prefix.endswith(".") and longer == [prefix + each for each in shorter]:
                rename = {before.format(prefix[:-1]): after.format(prefix[:-1])}
                stripped = (
                    " (tierfall import removes it, as a wrapper's)" if "module." in prefix else ""
                )
                self._work.report.refuses(
                    name, f"all names have the prefix {prefix!r} {what}{stripped}: rename={rename}"
                )
                return True
        return False

    def _state_dict(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._live.state_dict()
        except Exception as error:
            raise RestoreError(
                f"restore: state_dict() of {names.path(self._trail)} raised {type(error).__name__}: {error}"
            ) from error
        return found

    def _has_own_load(self) -> bool:
        """Return whether the module, or one in it, overrides how torch loads modules."""
        if _is_own(type(self._live), "load_state_dict"):
            return True
        kinds = {type(module) for _, _, module in self._scan.module_prefixes}
        return any(_is_own(kind, "_load_from_state_dict") for kind in kinds)

    def _entry(self, key: str, live: Any, node: Node, name: str) -> None:
        """Restore one entry in place, or plan how its value is built for load_state_dict."""
        work = self._work
        if key in self._scan.by_extra_state_key:
            self._extra_state(key, self._scan.by_extra_state_key[key], node, live)
            return
        if not isinstance(node, TENSORS) or not isinstance(live, torch.Tensor):
            device = live.device if isinstance(live, torch.Tensor) else CPU
            self._through_load(key, node, device)
            return
        if is_lazy(live):
            work.report.refuses(name, f"cannot be restored into: {refusal(live)}")
            return
        owner = self._scan.owner_of(key, live)
        if owner is not None and owner.numel() != live.numel():
            owner = None  # a hook's view of a part of it: load_state_dict restores it
        if owner is None and live.layout is torch.strided and live.numel():
            if isinstance(node, WrapperNode):
                self._through_load(key, node, live.device)
            elif work.matcher.compare(node.position, live, name):
                self._copy(key, live, node, name)
            return
        self._in_place.append(key)
        if isinstance(owner, nn.Parameter):
            work.filled_parameters.append(owner)
        if isinstance(node, QuantizedNode) and owner is not None:
            live = owner
        work.matcher.fill(node, live, name)

    def _copy(
        self, key: str, live: torch.Tensor, node: TensorNode | QuantizedNode, name: str
    ) -> None:
        """Restore a tensor that is not the module's memory: a copy that a hook made."""
        if not is_sharded(live):
            self._through_load(key, node, live.device)
            return
        builder = self._work.builder
        if not builder.header.merged or isinstance(node, QuantizedNode):
            builder.prepare(node, live.device)
            self._rest[key] = lambda: as_dtensor_like(live, builder.build(node, live.device))
            return
        made = self._work.block_like(node.position, live, live.device, name)
        if made is not None:
            self._rest[key] = lambda: made

    def _through_load(self, key: str, node: Node, device: torch.device) -> None:
        builder = self._work.builder
        builder.prepare(node, device)
        self._rest[key] = lambda: builder.build(node, device)

    def _extra_state(self, key: str, owner: nn.Module, node: Node, live: Any) -> None:
        """Restore what ``get_extra_state`` returned. A tensor in it may have another shape than the saved one."""
        device = live.device if isinstance(live, torch.Tensor) else CPU
        if type(owner).set_extra_state is nn.Module.set_extra_state:
            self._through_load(key, node, device)
            return
        builder = self._work.builder
        builder.prepare(node, device)
        self._work.assignments.append(lambda: owner.set_extra_state(builder.build(node, device)))

    # ---- after the bytes

    def _after_load(self) -> None:
        """Call the post hooks of load_state_dict; all entries were filled in place."""
        for _, _, module in reversed(self._scan.module_prefixes):
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys([], []))

    def _load(self, keys: tuple[str, ...]) -> None:
        live, what = self._live, names.path(self._trail)
        whole = self._state_dict()
        if tuple(whole) != keys:
            raise RestoreError(
                f"restore: two calls of state_dict() of {what} returned different keys; its hooks must return the same "
                "keys at each call"
            )
        expected = {key: _digest(whole[key]) for key in self._in_place}
        built = {key: make() for key, make in self._rest.items()}
        expected |= {key: _digest(v) for key, v in built.items() if isinstance(v, torch.Tensor)}
        whole.update(built)
        self._work.filled_parameters += live.parameters()
        try:
            live.load_state_dict(whole)
        except Exception as error:
            raise RestoreError(f"restore: load_state_dict of {what} failed: {error}") from error
        self._compare(expected, what)

    def _compare(self, expected: Mapping[str, bytes], what: str) -> None:
        after = self._state_dict()
        wrong = [
            key
            for key, digest in expected.items()
            if not isinstance(after.get(key), torch.Tensor) or _digest(after[key]) != digest
        ]
        if not wrong:
            return
        text = (
            f"restore: after load_state_dict of {what} its state_dict() differs from what was loaded: "
            f"{format_some([*map(repr, wrong)])}"
        )
        if not self._work.report.strict:
            logger.warning("%s", text)
            return
        name = f"{self._name}.{self._scan.key_name(wrong[0])}"
        raise RestoreError(
            f"{text}; its load hooks must reverse its state_dict hooks. skip=[{name!r}] leaves out an entry that does "
            "not matter, strict=False only logs a warning"
        )


def _is_own(kind: type[nn.Module], method: str) -> bool:
    """Return whether a class, or a base of it, overrides a method of torch."""
    definer = next(base for base in kind.__mro__ if method in base.__dict__)
    return definer.__module__.partition(".")[0] != "torch"


def _digest(tensor: torch.Tensor) -> bytes:
    """Digest dtype, shape and bytes of a tensor; of a sharded one, this rank's part; of a wrapper, its inner
    tensors."""
    found = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for local in map(local_tensor, wrappers.inner_tensors(tensor)):
        found.update(memoryview(to_bytes(local).cpu().numpy()))  # type: ignore[arg-type]
    return found.digest()
