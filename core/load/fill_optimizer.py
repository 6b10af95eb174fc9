"""Restoring a stock optimizer: its state tensor by tensor, in the saved dtype, and its groups by value.

``Optimizer.load_state_dict`` would cast the state to the dtype of the parameter. Here a state tensor is filled in place
where device, dtype and shape are equal, and replaced otherwise. State that the checkpoint does not have is removed.
``step`` is on the device where torch keeps it: the CPU, unless the group is capturable or fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tierfall.core.image.header import StoredTensor
from tierfall.core.image.tree import (
    MapNode,
    Node,
    OptimizerNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    leaves,
)
from tierfall.core.load.build import CPU, Make
from tierfall.core.load.match import can_resize, part_of, plan_common, shape_of_state
from tierfall.core.load.plan import RestoreWork, assigned
from tierfall.core.state import optimizers
from tierfall.core.tensors import names
from tierfall.core.tensors.dtensor import (
    as_dtensor_like,
    is_block,
    is_sharded,
    piece_of,
)
from tierfall.core.tensors.tensors import laid_out_as, refusal
from tierfall.core.tensors.wrappers import is_wrapper
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import format_some

_STEP = "step"
_NAMES = "param_names"
_ON_DEVICE = ("capturable", "fused")


class OptimizerFiller:
    """Plans one optimizer as part of a restore."""

    def __init__(self, work: RestoreWork, node: OptimizerNode, live: Optimizer, name: str) -> None:
        self._work = work
        self._builder = work.builder
        self._node = node
        self._live = live
        self._name = name
        self._numbering = optimizers.number_parameters(live, work.scans)

    def plan(self) -> None:
        groups = self._match()
        if groups is None:
            return
        live_number, live_groups = groups
        steps_on_device = self._steps_on_device()
        parameters = optimizers.parameters_of(self._live)
        for (_, node), index in zip(self._node.groups, live_groups, strict=True):
            # The name has the index in the state, since skip=[...] names groups of the state.
            self._group(node, self._live.param_groups[index], f"{self._name}.param_groups.{index}")
        kept: set[Any] = set()
        for key, node in self._node.state:
            name = f"{self._name}.state.{self._node.entry_name(key)}"
            if not isinstance(key, int):
                kept.add(key[0])
                self._state(node, key[0], None, CPU, CPU, name)
                continue
            parameter = parameters[live_number[key]]
            kept.add(id(parameter))
            step_device = parameter.device if key in steps_on_device else CPU
            position = self._work.positions.get(self._node.names[key] or "")
            stored = None if position is None else self._work.header.tensors[position]
            self._state(node, parameter, stored, parameter.device, step_device, name)
        self._work.assignments.append(lambda: self._remove_others(kept))
        self._work.assignments.append(self._after_load)
        self._work.replaced_names.append(f"{self._name}.state")

    # ---- matching groups and parameters

    def _match(self) -> tuple[list[int], list[int]] | None:
        """Return the number of the state's parameter for each saved number, and the index of the state's group for each
        saved group; None, once reported, where they do not match."""
        stored, live = self._node, self._numbering
        if not (any(stored.names) and any(live.names)):
            return self._match_by_place()
        stored_keys = [stored.entry_name(number) for number in range(len(stored.names))]
        keys = self._stored_names(stored_keys)
        live_keys = {key: number for number, key in enumerate(keys)}
        stored_sets = [frozenset(stored_keys[n] for n in numbers) for numbers, _ in stored.groups]
        live_sets = [frozenset(keys[n] for n in numbers) for numbers in live.groups]
        order: list[int] = []
        for index, group in enumerate(stored_sets):
            found = next(
                (i for i, g in enumerate(live_sets) if g == group and i not in order), None
            )
            if found is None:
                self._differs(index, group, live_sets)
                return None
            order.append(found)
        if len(order) != len(live_sets):
            self._work.report.refuses(
                f"{self._name}.param_groups",
                f"the checkpoint has {len(order)} groups, the state has {len(live_sets)}: create the optimizer with "
                f"the saved groups and call add_param_group() after the restore, or {self._plan_new()}",
                skip=self._name,
            )
            return None
        if order != sorted(order) and self._work.is_scheduled(self._live):
            self._work.report.refuses(
                f"{self._name}.param_groups",
                f"the groups are in another order, {order}, and a scheduler has its learning rates by group index: add "
                "the groups in the saved order",
            )
        return [live_keys[key] for key in stored_keys], order

    def _stored_names(self, stored_keys: Sequence[str]) -> list[str]:
        """Return the name that the optimizer has in the checkpoint for each parameter of the state, or its own. A
        parameter of several names has that of the entry which was first at the save, or is now."""
        live = self._numbering
        own = [live.state_name(number) for number in range(len(live.names))]
        if not set(own) - set(stored_keys):
            return own
        known = {alias: key for key in stored_keys for alias in self._work.stored_aliases(key)}
        found = [
            next(
                (known[name] for name in (n, *self._work.names_of.get(p, ())) if name in known),
                n,
            )
            for n, p in zip(own, live.ids, strict=True)
        ]
        return found if len(set(found)) == len(set(own)) else own

    def _match_by_place(self) -> tuple[list[int], list[int]] | None:
        # One side has no names: match by group and index, as torch does.
        stored = [len(numbers) for numbers, _ in self._node.groups]
        live = [len(numbers) for numbers in self._numbering.groups]
        if stored != live:
            self._work.report.differs(
                f"{self._name}.param_groups",
                f"groups of {stored} parameters",
                f"groups of {live} (put the optimizer's modules into the state to match them by name)",
            )
            return None
        if not any(self._node.names) and (moved := self._moved()):
            self._work.report.refuses(
                self._name,
                "the checkpoint has no names for its parameters, so that its state matches by their order, and the "
                f"model declares {moved} in another order than the checkpoint: declare them in that order, or "
                f"{self._plan_new()}",
                skip=self._name,
            )
            return None
        numbers = list(range(len(self._node.names)))
        for (stored_group, _), live_group in zip(
            self._node.groups, self._numbering.groups, strict=True
        ):
            for stored_number, live_number in zip(stored_group, live_group, strict=True):
                numbers[stored_number] = live_number
        return numbers, list(range(len(live)))

    def _moved(self) -> str:
        """Return the names of parameters whose order in the model is not that of the checkpoint; empty if all is."""
        stored = {n: at for at, (n, _) in enumerate(leaves(self._work.header.tree, ""))}
        own = stored.keys() & set(self._numbering.names)
        live = [name for name in self._work.scans.parameters.values() if name in own]
        pairs = zip(live, sorted(live, key=stored.__getitem__), strict=True)
        return format_some([name for name, other in pairs if name != other])

    def _differs(
        self, index: int, group: frozenset[str], live_sets: Sequence[frozenset[str]]
    ) -> None:
        nearest = max(live_sets, key=lambda g: len(g & group), default=frozenset())
        missing = sorted(group - nearest)[:3]
        more = sorted(nearest - group)[:3]
        self._work.report.refuses(
            f"{self._name}.param_groups.{index}",
            f"no parameter group of the state holds the same {len(group)} parameters; the nearest lacks "
            f"{missing or 'none of them'} and also has {more or 'no others'}: group the parameters as they were saved, "
            f"or {self._plan_new()}",
            skip=self._name,
        )

    def _plan_new(self) -> str:
        return f"pass skip=[{self._name!r}] to start with a new optimizer"

    def _steps_on_device(self) -> set[int]:
        found: set[int] = set()
        for numbers, node in self._node.groups:
            if isinstance(node, ValueNode):
                self._builder.prepare(node, CPU)
                flags: dict[Any, Any] = self._plain(node)
            else:
                assert isinstance(node, MapNode), "a group that is no mapping"
                flags = {
                    key: self._plain(child)
                    for key, child in node.entries
                    if key in _ON_DEVICE and isinstance(child, ValueNode)
                }
            if any(flags.get(key) is True for key in _ON_DEVICE):
                found.update(numbers)
        return found

    def _plain(self, node: ValueNode) -> Any:
        return {} if node.blobs else self._builder.value(node)

    # ---- groups

    def _group(self, node: Node, live: dict[str, Any], name: str) -> None:
        work = self._work
        if not work.choices.has(name):
            return

        def is_selected(key: Any) -> bool:
            # The group of the state keeps its names, which are in the order of its parameters.
            return key != _NAMES and not work.choices.skipped(f"{name}.{names.component(key)}")

        if isinstance(node, ValueNode):
            work.assignments.append(
                lambda: _update(
                    live, {k: v for k, v in self._builder.value(node).items() if is_selected(k)}
                )
            )
            return
        assert isinstance(node, MapNode), "a group that is no mapping"
        for key, child in node.entries:
            if not is_selected(key):
                continue
            value = live.get(key)
            if isinstance(child, TensorNode) and value is not None and self._fits(child, value):
                work.matcher.tensor(child.position, value, f"{name}.{names.component(key)}")
                continue
            device = value.device if isinstance(value, torch.Tensor) else CPU
            make = self._builder.prepare(child, device)
            work.assignments.append(partial(_set_entry, live, key, make))

    # ---- state

    def _state(
        self,
        node: Node,
        key: Any,
        parameter: StoredTensor | None,
        device: torch.device,
        step_device: torch.device,
        name: str,
    ) -> None:
        """Restore the state under ``key``; ``parameter`` is its parameter in the image."""
        choices = self._work.choices
        if not choices.selects_at_or_below(name):
            return
        if isinstance(key, torch.Tensor) and is_lazy(key):
            self._work.report.refuses(name, f"cannot be restored for it: {refusal(key)}")
            return
        live = self._live.state.get(key)
        if not isinstance(node, MapNode) or not isinstance(live, dict | None):
            make_all = self._builder.prepare(node, device)
            self._work.assignments.append(partial(_set_entry, self._live.state, key, make_all))
            return
        made: dict[Any, Make | None] = {}
        for entry, child in node.entries:
            below = f"{name}.{names.component(entry)}"
            if choices.selects_at_or_below(below):
                target = step_device if entry == _STEP else device
                value = None if live is None else live.get(entry)
                made[entry] = self._entry(entry, child, key, parameter, value, target, below)
        whole = choices.has(name)
        self._work.assignments.append(lambda: self._renew(key, made, whole))

    def _entry(
        self,
        entry: Any,
        node: Node,
        parameter: Any,
        saved: StoredTensor | None,
        live: Any,
        device: torch.device,
        name: str,
    ) -> Make | None:
        """Plan one entry of the state of ``parameter``, which is ``saved`` in the image. Return what makes it once the
        bytes are read; None if the existing tensor ``live`` is filled."""
        builder = self._builder
        if isinstance(node, TensorNode):
            resized = self._resized(entry, node, parameter, saved, device)
            if resized is not None:
                return lambda: resized
        if self._fill_in_place(node, parameter, live, device, name):
            return None
        if not isinstance(node, TensorNode):
            self._check_shape(entry, node, parameter, saved, name)
            return builder.prepare(node, device)
        stored = builder.header.tensors[node.position]
        if stored.piece is not None and not is_block(parameter, stored.piece):
            part = "another block, or none" if is_sharded(parameter) else "the whole"
            self._work.report.differs(
                name,
                f"{stored.piece.lengths} at {stored.piece.offset} of {stored.piece.shape}",
                f"a parameter of which this rank has {part}",
            )
        self._check_shape(entry, node, parameter, saved, name)
        if (
            builder.header.merged
            and is_sharded(parameter)
            and stored.shape == tuple(parameter.shape)
        ):
            block = self._work.block_like(node.position, parameter, device, name)
            return lambda: block
        make = builder.prepare(node, device)
        if stored.piece is not None:
            return lambda: as_dtensor_like(parameter, make())
        if saved is None or (stored.shape, stored.strides) == (saved.shape, saved.strides):
            # Optimizers create state with the strides of its parameter, and fused ones iterate over both in memory
            # order: state that was saved so gets the strides of the parameter now.
            return lambda: laid_out_as(parameter, builder.tensor(node.position, device))
        return make

    def _check_shape(
        self, entry: Any, node: Node, parameter: Any, stored: StoredTensor | None, name: str
    ) -> None:
        """Report state whose shape does not fit that of its parameter now: a fused optimizer would read out of bounds.
        ``stored`` is the parameter in the image."""
        header = self._builder.header
        if not isinstance(node, TensorNode | WrapperNode) or not isinstance(
            parameter, torch.Tensor
        ):
            return
        if isinstance(node, WrapperNode):
            shape = tuple(header.values[node.shape.number][1])
        else:
            shape = header.tensors[node.position].whole_shape
        now = tuple(parameter.shape)
        fitting = shape_of_state(self._live, entry, shape, stored, now)
        resize = self._resize_name(parameter)
        if fitting is None or (fitting != shape and resize and self._work.choices.resizes(resize)):
            self._work.report.refuses(
                name,
                f"its shape {shape} cannot be resized for the shape {now} of its parameter; skip=[{name!r}] leaves it "
                f"out, and skip=[{name.rpartition('.')[0]!r}] the parameter's whole state",
            )
        elif fitting != shape:
            self._work.report.differs(
                name, f"shape {shape}", f"a parameter of shape {now}", resize=resize
            )

    def _resize_name(self, parameter: Any) -> str:
        """Return the name that resizes a parameter: one that the caller has given, else its first one."""
        if not isinstance(parameter, torch.Tensor):
            return ""
        first = self._numbering.names[self._numbering.numbers[id(parameter)]] or ""
        names = [first, *self._work.names_of.get(id(parameter), ())]
        return next((name for name in names if self._work.choices.resizes(name)), first)

    def _resized(
        self,
        entry: Any,
        node: TensorNode,
        parameter: Any,
        saved: StoredTensor | None,
        device: torch.device,
    ) -> torch.Tensor | None:
        """Return new state of a parameter that has another shape now, and may: zeros, where the stored state has no
        value. None if it is not resized."""
        if not isinstance(parameter, torch.Tensor):
            return None
        if not self._work.choices.resizes(self._resize_name(parameter)):
            return None
        stored, now = self._builder.header.tensors[node.position], tuple(parameter.shape)
        shape = shape_of_state(self._live, entry, stored.whole_shape, saved, now)
        if shape is None or shape == stored.whole_shape:
            return None
        if shape == now:
            if not can_resize(stored, parameter):
                return None
            local, offset = part_of(parameter)
            made = torch.zeros_like(local.detach(), dtype=stored.dtype, device=device)
        elif is_sharded(parameter) or stored.piece is not None:
            return None
        else:  # a factor
            made = torch.zeros(shape, dtype=stored.dtype, device=device)
            offset = (0,) * len(shape)
        self._work.matcher.copies.append(plan_common(self._builder, node.position, made, offset))
        return as_dtensor_like(parameter, made) if is_sharded(parameter) else made

    def _fill_in_place(
        self, node: Node, parameter: Any, live: Any, device: torch.device, name: str
    ) -> bool:
        """Plan to fill a state tensor in place; False where it has to be replaced."""
        if isinstance(node, WrapperNode) and is_wrapper(live) and live.device == device:
            self._work.matcher.fill(node, live, name)
            return True
        if not isinstance(node, TensorNode) or not isinstance(live, torch.Tensor):
            return False
        stored = self._builder.header.tensors[node.position]
        shape = stored.shape if stored.piece is None else stored.piece.shape
        same = self._builder.header.merged or is_block(live, stored.piece)
        if tuple(live.shape) != shape or not same:
            self._work.matcher.compare(node.position, live, name, self._resize_name(parameter))
            return True
        if not self._fits(node, live) or live.device != device:
            return False
        self._work.matcher.tensor(node.position, live, name)
        return True

    def _fits(self, node: TensorNode, live: Any) -> bool:
        stored = self._builder.header.tensors[node.position]
        if self._builder.header.merged and is_sharded(live):
            return live.dtype is stored.dtype and tuple(live.shape) == stored.shape
        if stored.piece is not None:
            return piece_of(live) == stored.piece and live.dtype is stored.dtype
        return (
            type(live) in (torch.Tensor, torch.nn.Parameter)
            and live.dtype is stored.dtype
            and tuple(live.shape) == stored.shape
        )

    def _renew(self, key: Any, made: Mapping[Any, Make | None], whole: bool) -> None:
        live = self._live.state[key]
        renewed = {entry: live[entry] if make is None else make() for entry, make in made.items()}
        if whole:
            name = self._state_name(key)
            skipped = self._work.choices.skipped
            kept = {e: v for e, v in live.items() if skipped(f"{name}.{names.component(e)}")}
            live.clear()
            live.update(kept)
        live.update(renewed)

    def _after_load(self) -> None:
        """Do what ``load_state_dict`` does once it has filled in: classes convert what other versions saved."""
        filled = {"state": self._live.state, "param_groups": self._live.param_groups}
        try:
            self._live.__setstate__(filled)
        except Exception as error:
            raise RestoreError(f"restore: __setstate__ of {self._name} failed: {error}") from error

    def _remove_others(self, kept: set[Any]) -> None:
        for key in list(self._live.state):
            known = id(key) if isinstance(key, torch.Tensor) else key
            if known not in kept and self._work.choices.has(self._state_name(key)):
                del self._live.state[key]

    def _state_name(self, key: Any) -> str:
        number = self._numbering.numbers.get(id(key))
        part = (
            names.component(key)
            if not isinstance(key, torch.Tensor)
            else (self._numbering.state_name(number) if number is not None else "%")
        )
        return f"{self._name}.state.{part}"


def _set_entry(live: Any, key: Any, make: Make) -> None:
    live[key] = assigned(live.get(key), make())


def _update(live: dict[str, Any], values: dict[Any, Any]) -> None:
    for key, value in values.items():
        live[key] = assigned(live.get(key), value)
