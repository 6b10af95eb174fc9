"""Export: a checkpoint, or a part of it, as one file, as shards of safetensors, or as a DCP folder, which are readable
without tierfall.

The state of all ranks is merged: tensors are whole, values are rank 0's, and differing entries of other ranks are below
``per_rank.<rank>``. With one rank there is nothing to merge.

Every chunk is verified, and a damaged one is read from the next copy. Bytes are read to their offsets in the mapped
safetensors file itself, or in a temporary one, from which torch writes.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tierfall.core.copies.checkpoint_reader import OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.documents import sha256
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    OptimizerNode,
    TensorNode,
    WrapperNode,
    walk,
)
from tierfall.core.load.build import CPU, Builder, Make
from tierfall.core.tensors.builtin_codecs import UnknownValue
from tierfall.core.types.errors import BackendError
from tierfall.core.types.values import ExportFormat
from tierfall.export.gather import Memory, MergedCheckpoint, gather, mapped_file, positions_in
from tierfall.export.output import (
    ExportOptions,
    ExportResult,
    check_free,
    file_name,
    first_cause,
    new_output,
)
from tierfall.export.safetensors_files import export_safetensors
from tierfall.export.structure import (
    CARRIED,
    StatePart,
    Structure,
    entries_of,
    plan_carried,
    select,
)
from tierfall.telemetry.progress import Watch

__all__ = ["ExportFormat", "ExportOptions", "ExportResult", "export"]


def export(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    wish: ExportOptions,
    watch: Watch = lambda done, total: None,
) -> ExportResult:
    """Write one checkpoint, read from ``tiers``, fastest first; ``watch`` receives bytes read and bytes in all.

    Raises ConfigError for unknown parts, IntegrityError if no copy is good, BackendError and CapacityError for an
    unusable target, and RestoreError for parts that differ among ranks and cannot be merged.
    """
    wish.check()
    gathered = gather(checkpoint, tiers, open_image)
    path = wish.to
    if not (wish.is_folder or wish.is_file):
        path = wish.to / file_name(gathered.run, gathered.id, wish)
    check_free(path, folder=wish.is_folder, replace=wish.replace)
    parts = select(gathered.header, wish.only)
    gathered.check(parts)
    gathered.report_to(watch, parts)
    tensors, notes = _EXPORT[wish.format](gathered, parts, path, wish)
    if gathered.own is not None and any(part.name in ("", gathered.own) for part in parts):
        notes.append(f"entries that differ from rank 0's are below {gathered.own}, by rank")
    files = [path] if path.is_file() else list(path.iterdir())
    return ExportResult(
        id=checkpoint.id,
        path=path,
        bytes=sum(file.stat().st_size for file in files),
        tensors=tensors,
        sources=dict(gathered.images.tally.bytes),
        fallbacks=tuple(gathered.images.tally.fallbacks),
        notes=tuple(notes),
    )


# torch and DCP ---------------------------------------------------------------------------------------


class _MappedBuilder(Builder):
    """Builds a state whose tensors are in ``memory``; ``places`` has the offset of each."""

    def __init__(self, header: ImageHeader, memory: Memory, places: Mapping[int, int]) -> None:
        super().__init__(header)
        self._memory = memory
        self._places = places
        self._mapped: dict[int, torch.Tensor] = {}
        self.notes: dict[str, str] = {}
        """By the name of a class or a codec that is not there."""

    def unknown(self, value: UnknownValue) -> object:
        """Export what was saved of the value."""
        self.notes[value.name] = (
            f"values of {value.name} are exported as plain values: {value.reason}"
        )
        return value.value

    def flat(self, position: int, device: torch.device) -> torch.Tensor:
        """Return the bytes of a tensor in the memory, as a storage of its own: torch.save writes whole storages."""
        if position not in self._mapped:
            start, length = self._places[position], self.header.tensors[position].length
            # Without bytes, it must not begin where another one does: torch.save refuses that.
            empty = torch.empty(0, dtype=torch.uint8)
            found = torch.from_numpy(self._memory[start : start + length]) if length else empty
            self._mapped[position] = found
        return self._mapped[position]

    def carried(
        self,
        parts: Sequence[StatePart],
        name_of: Mapping[int, str],
        written_with: str | None = None,
    ) -> Iterator[memoryview]:
        """Yield the bytes of the image that describes what was written, for an import; ``name_of`` has the names there
        of tensors, by address, and ``written_with`` is as in ``plan_carried``."""
        nodes = [node for part in parts for node in walk(part.node) if isinstance(node, TensorNode)]
        built = {node.position: self.laid_out(node.position, CPU).data_ptr() for node in nodes}
        places = {p: name_of[address] for p, address in built.items() if name_of.get(address)}
        structure = Structure(self.header, entries_of(parts))
        layout, view = plan_carried(structure, places, written_with)
        head = layout.header(view)
        assert head is not None, "the layout was planned with these values"
        yield memoryview(head)
        for placement in layout.placements:
            flat = self.flat(structure.positions[placement.index], CPU)
            yield memoryview(flat.numpy())  # type: ignore[arg-type]


class _DcpBuilder(_MappedBuilder):
    """Builds the states of optimizers with DCP's names, and wrappers as mappings of their inner tensors: no class is
    needed to export them."""

    def _prepare_wrapper(self, node: WrapperNode) -> None:
        pass

    def _wrapper(self, node: WrapperNode, inner: dict[str, torch.Tensor], shape: Make) -> Any:
        return inner

    def _optimizer(self, node: OptimizerNode, built: Sequence[Any]) -> dict[str, Any]:
        state = super()._optimizer(node, built)
        return _by_parameter(node, state, _prefix_of(node, self.header.tree))


def _build(
    kind: type[_MappedBuilder], gathered: MergedCheckpoint, parts: Sequence[StatePart], beside: Path
) -> tuple[_MappedBuilder, Any]:
    """Build the state of the parts, or of a single part, and return its builder too. Its tensors are in an unlinked
    file, which is freed with its mapping; each begins at a multiple of 64 bytes."""
    places, end = {}, 0
    for position in positions_in(parts):
        places[position] = end
        end += -(-gathered.header.tensors[position].length // 64) * 64
    path = beside.with_name(f"{beside.name}.image")
    try:
        memory = mapped_file(path, max(end, 1))
    finally:
        path.unlink(missing_ok=True)  # so that nothing remains after a crash
    builder = kind(gathered.header, memory, places)
    gathered.read({position: [builder.flat(position, CPU)] for position in places})
    makes = {part.name: builder.prepare(part.node, CPU) for part in parts}
    built = {name: make() for name, make in makes.items()}
    return builder, built[parts[0].name] if len(parts) == 1 else built


def _export_torch(
    gathered: MergedCheckpoint, parts: tuple[StatePart, ...], path: Path, wish: ExportOptions
) -> tuple[int, list[str]]:
    room_bytes = _room_bytes(gathered, parts)
    with new_output(path, replace=wish.replace, room_bytes=room_bytes) as unfinished:
        builder, state = _build(_MappedBuilder, gathered, parts, unfinished)
        number_of = _save_torch(state, unfinished, path)
        _add_member(unfinished, CARRIED, builder.carried(parts, number_of))
        notes = [*builder.notes.values(), *_why_not_plain(unfinished)]
    return len(positions_in(parts)), notes


def _save_torch(value: object, unfinished: Path, path: Path) -> dict[int, str]:
    """Write a value to ``unfinished``, which is renamed to ``path`` later; returns the numbers that torch gives to the
    storages of its tensors, by their addresses.

    Raises BackendError if torch cannot write it, or the OSError or KeyboardInterrupt that torch's error hides.
    """
    found: dict[int, str] = {}

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            """Watch what torch's subclass of this writes in place of a storage."""
            number: Any = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                written = number(self, value)
                if written is not None:
                    found[getattr(value, "_untyped_storage", value).data_ptr()] = written[2]
                return written

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    try:
        with open(unfinished, "xb") as file:  # torch would record the temporary name in the file
            module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
            torch.save(value, file, pickle_module=module)
    except RuntimeError as error:  # also for a full disk, or Ctrl-C
        if (first := first_cause(error)) is not None:
            raise first from None
        why = str(error).splitlines()[0]
        raise BackendError(f"export to {path}: torch.save could not write it: {why}") from error
    found.pop(0, None)  # of no bytes
    return found


def _add_member(unfinished: Path, name: str, data: Iterable[memoryview]) -> None:
    """Add a member, which torch.load does not read, to the zip file that torch.save has written."""
    with zipfile.ZipFile(unfinished, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        with archive.open(zipfile.ZipInfo(f"{folder}/{name}"), "w", force_zip64=True) as member:
            for part in data:
                member.write(part)


def _why_not_plain(path: Path) -> list[str]:
    """Return a note unless ``torch.load`` accepts the file by default; no tensor is read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return [
            "torch.load accepts it only with weights_only=False, since it contains more than tensors and plain values, "
            "such as the random state of NumPy; --only names the parts to export"
        ]
    return []


def _export_dcp(
    gathered: MergedCheckpoint, parts: tuple[StatePart, ...], path: Path, wish: ExportOptions
) -> tuple[int, list[str]]:
    from tierfall.export.dcp_folder import save_dcp

    room_bytes = _room_bytes(gathered, parts)
    with new_output(path, folder=True, room_bytes=room_bytes) as unfinished:
        builder, state = _build(_DcpBuilder, gathered, parts, unfinished)
        if not isinstance(state, dict):  # a part that is none is keyed by the end of its name
            state = {parts[0].name.rpartition(".")[2]: state}
        name_of = save_dcp(state, unfinished, path)
        written_with = sha256((unfinished / ".metadata").read_bytes())
        with open(unfinished / CARRIED, "xb") as file:
            file.writelines(builder.carried(parts, name_of, written_with))
    return len(positions_in(parts)), [*builder.notes.values()]


def _by_parameter(node: OptimizerNode, built: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Key an optimizer's state by the names of its parameters without ``prefix``, as ``get_optimizer_state_dict`` does;
    by their numbers if the names are unknown."""
    if None in node.names:
        return built
    names = [str(name).removeprefix(prefix) for name in node.names]
    state = {names[k] if isinstance(k, int) else k: v for k, v in built["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in built["param_groups"]
    ]
    return {**built, "state": state, "param_groups": groups}


def _prefix_of(node: OptimizerNode, tree: MapNode) -> str:
    """Return the prefix of the names of an optimizer's parameters: the name of the one module that has them."""
    for key, child in tree.entries:
        prefix = f"{key}."
        if isinstance(child, ModuleNode) and all(str(n).startswith(prefix) for n in node.names):
            return prefix
    return ""


def _room_bytes(gathered: MergedCheckpoint, parts: Sequence[StatePart]) -> int:
    """Bytes of the mapped file, and of what torch writes from it."""
    return 2 * sum(gathered.header.tensors[position].length for position in positions_in(parts))


_EXPORT = {
    ExportFormat.SAFETENSORS: export_safetensors,
    ExportFormat.TORCH: _export_torch,
    ExportFormat.DCP: _export_dcp,
}
