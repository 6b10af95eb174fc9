"""``tiers://``: the checkpoints of a run as a file system, for libraries that accept only a path.

    torch.distributed.checkpoint.save(state, checkpoint_id="tiers://run/step-00000100")

It supports the operations of DCP: files are written, renaming ``.metadata`` commits them as a checkpoint, and they are
read. It has no state: ``run.by_path`` stages and commits, ``path.reading`` finds and reads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

import tierfall
from tierfall.config import load_config
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.types.errors import ConfigError, KeyNotFoundError, LockError, NotSupportedError
from tierfall.core.types.values import CheckpointId
from tierfall.integrations.path.names import METADATA, PROTOCOL, TierPath, folder_of, parse
from tierfall.integrations.path.reading import CheckpointFiles, PathFile, ReadableTiers, tiers_of
from tierfall.run.by_path import PathSaves
from tierfall.run.open_run import opened_runs

logger = logging.getLogger("tierfall")
CONFIG = "TIERFALL_CONFIG"
_DATA, _TEMPORARY = ".distcp", f"{METADATA}.tmp"
_opening = threading.Lock()
_loaded: dict[str, tuple[CheckpointId, int]] = {}
"""What was loaded from each run that was not open in this process: a later save continues from there."""


class TierFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """``tiers://RUN/step-STEP/FILE``, served by the Checkpointer that is open for the run in this process, or by the
    configuration file that ``TIERFALL_CONFIG`` names.

    Errors are tierfall's own: ConfigError for an invalid path, StepError for a step that may not be saved,
    NotSupportedError for operations that DCP does not use, KeyNotFoundError (a FileNotFoundError) for a missing file.
    """

    protocol = PROTOCOL
    root_marker = ""

    # Writing ---------------------------------------------------------------------------------------

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Begin to save a step. Raises StepError for one that may not be saved, such as one that exists."""
        where = self._parse(path)
        _writer(where).begin(_own_step(where))

    def mkdir(self, path: str, create_parents: bool = True, **more: Any) -> None:
        """Same as ``makedirs``."""
        self.makedirs(path)

    def mv(self, path1: str, path2: str, **more: Any) -> None:
        """Commit a step: renaming ``.metadata.tmp`` to ``.metadata`` makes the files of all ranks a checkpoint."""
        source, target = self._parse(path1), self._parse(path2)
        same = (source.run, source.step) == (target.run, target.step)
        if not same or (source.name, target.name) != (_TEMPORARY, METADATA):
            raise NotSupportedError(
                f"{source} to {target}: only {_TEMPORARY} is renamed, to {METADATA} beside it"
            )
        _writer(source).commit(_own_step(source), source.name, target.name)

    def rename(self, path1: str, path2: str, **more: Any) -> None:
        self.mv(path1, path2, **more)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for one in [path] if isinstance(path, str) else path:
            self.rm_file(one)

    def rm_file(self, path: str) -> None:
        """Abandon the save that a file belongs to; a committed checkpoint is not deleted."""
        where = self._parse(path)
        saves = _open_run(where)
        if saves is not None and where.step is not None and saves.is_staged(where.step):
            saves.give_up(where.step, where.name)
            return
        if not self.exists(path):
            raise KeyNotFoundError(f"{where}: it is not there")
        raise NotSupportedError(
            f"{where}: a checkpoint is deleted as a whole, by 'tierfall rm' or Checkpointer.delete"
        )

    # Reading ---------------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        where = self._parse(path)
        if where.step is None or not where.name:
            raise ConfigError(f"{where} is no file")
        if mode == "rb":
            return self._open_to_read(where)
        if mode not in ("wb", "xb"):
            raise NotSupportedError(
                f"{where}: mode {mode!r}; files are read (rb) or written once (wb)"
            )
        if not (where.name.endswith(_DATA) or where.name == _TEMPORARY):
            raise NotSupportedError(
                f"{where}: only what torch.distributed.checkpoint's own file writer writes ({_DATA} files and "
                f"{METADATA}) can be saved by path; save anything else with Checkpointer.save"
            )
        return _writer(where).create(_own_step(where), where.name)

    def _open_to_read(self, where: TierPath) -> PathFile:
        with ExitStack() as stack:
            tiers = stack.enter_context(_tiers(where))
            checkpoint = tiers.find(where)
            files = CheckpointFiles(checkpoint, tiers)
            file = files.find(where.name)
            if file is None:
                raise _no_file(where, files)
            if where.name == METADATA:
                _note_loaded(where, checkpoint)
            return PathFile(files.open(file), file.bytes, stack.pop_all().close)

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        where = self._parse(path)
        if where.step is None:
            return self._info_of_run(where)
        if _is_staged(where):
            raise KeyNotFoundError(f"{where}: this step is being written")
        with _tiers(where) as tiers:
            checkpoint = tiers.find(where)
            if not where.name:
                return _folder(path)
            files = CheckpointFiles(checkpoint, tiers)
            file = files.find(where.name)
            if file is None:
                raise _no_file(where, files)
            return {"name": path, "size": file.bytes, "type": "file"}

    def _info_of_run(self, where: TierPath) -> dict[str, Any]:
        if where.run and _open_run(where) is None:
            with _tiers(where) as tiers:
                if not any(x.attempts or x.copies for x in tiers.listings):
                    tiers.check_read(where, "may hold this run")
                    raise KeyNotFoundError(f"{where}: no tier holds anything of this run")
        return _folder(where.run)

    def exists(self, path: str, **more: Any) -> bool:
        """Return whether the path exists; raises the error of a tier that could not be listed."""
        try:
            self.info(self._strip_protocol(path))
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        """List the runs that are open in this process, the steps of a run that were saved by path, or the files of one.

        The steps are those of all tiers: if one of them cannot be read, its error is raised."""
        path = self._strip_protocol(path)
        where = self._parse(path)
        if not where.run:
            found = [_folder(saves.session.run) for saves in opened_runs()]
        elif where.name:
            found = [self.info(path)]
        else:
            with _tiers(where) as tiers:
                found = _steps(where, tiers) if where.step is None else _files(path, where, tiers)
        return found if detail else [one["name"] for one in found]

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = None,
        **more: Any,
    ) -> Any:
        """As fsspec's, also for ``find`` and ``glob``, but errors are raised instead of omitted."""
        return super().walk(path, maxdepth, topdown, on_error or _raise_unless_absent, **more)

    def _parse(self, path: str) -> TierPath:
        return parse(self._strip_protocol(path))


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _steps(where: TierPath, tiers: ReadableTiers) -> list[dict[str, Any]]:
    # A program restores the newest of these: without one tier's steps it would restore an older one.
    tiers.check_read(where, "may hold further steps")
    known = tiers.checkpoints().values()
    for one in known:
        for copy in one.copies.values() if one.commit is None else ():
            if copy.unread is not None:
                raise copy.unread
            logger.warning("%s: this step is left out: %s", where, copy.damage)
    return [
        _folder(folder_of(tiers.run, one.id, live=not one.abandoned))
        for one in known
        if one.commit is not None and CheckpointFiles(one, tiers).is_by_path()
    ]


def _files(path: str, where: TierPath, tiers: ReadableTiers) -> list[dict[str, Any]]:
    if _is_staged(where):
        raise KeyNotFoundError(f"{where}: this step is being written")
    files = CheckpointFiles(tiers.find(where), tiers)
    return [
        {"name": f"{path}/{name}", "size": file.bytes, "type": "file"}
        for name, file in sorted(files.all().items())
    ]


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _no_file(where: TierPath, files: CheckpointFiles) -> KeyNotFoundError:
    if not files.is_by_path():
        return KeyNotFoundError(
            f"{where}: this step was not saved by path: restore it by Checkpointer.restore or tierfall.load"
        )
    return KeyNotFoundError(f"{where}: no rank wrote a file of this name")


# Finding the run of a path ---------------------------------------------------------------------------


def _open_run(where: TierPath) -> PathSaves | None:
    """Return the Checkpointer that is open for a path's run."""
    if not where.run:
        raise ConfigError(f"{where} names no run")
    found = [saves for saves in opened_runs() if saves.session.run == where.run]
    if len(found) > 1:
        raise ConfigError(
            f"{where}: {len(found)} Checkpointers of run {where.run!r} are open in this process, on different tiers: "
            "give each run a name of its own"
        )
    return found[0] if found else None


def _config(where: TierPath) -> str:
    config = os.environ.get(CONFIG, "")
    if not config:
        runs = ", ".join(sorted(saves.session.run for saves in opened_runs())) or "none"
        raise ConfigError(
            f"{where}: no Checkpointer of run {where.run!r} is open in this process (open: {runs}), and {CONFIG} names "
            "no configuration. Open one by tierfall.open, or set that. The child process of an async_save in PROCESS "
            "mode has no Checkpointer: use AsyncCheckpointerType.THREAD, or set it and open none in the parent"
        )
    return config


@contextmanager
def _tiers(where: TierPath) -> Iterator[ReadableTiers]:
    saves = _open_run(where)
    with tiers_of(where, saves, "" if saves else _config(where)) as tiers:
        yield tiers


def _writer(where: TierPath) -> PathSaves:
    """Return the Checkpointer of a path's run; if none is open, the one of the configuration, which stays open until
    the process ends."""
    with _opening:
        saves = _open_run(where)
        if saves is not None:
            return saves
        path = _config(where)
        config = load_config(path)
        if config.run != where.run:
            raise ConfigError(
                f"{where}: {path} ({CONFIG}) is the configuration of run {config.run!r}; a path of another run can be "
                "read, not written"
            )
        try:
            tierfall.open(config)
        except LockError as error:
            raise LockError(
                f"{where}: {error}. If that is the parent of this process: it may save in THREAD mode, or open no "
                "Checkpointer"
            ) from error
        saves = _open_run(where)
        assert saves is not None
        saves.note_opened_by_path()
        if (loaded := _loaded.get(where.run)) is not None:
            saves.note_loaded(*loaded)
        return saves


def _own_step(where: TierPath) -> int:
    if where.step is None:
        raise ConfigError(f"{where} names no step; expected {PROTOCOL}://{where.run}/step-STEP")
    if where.attempt is not None:
        raise ConfigError(f"{where}: a save gets the attempt of this start; leave the attempt out")
    return where.step


def _is_staged(where: TierPath) -> bool:
    """Return whether this process is writing the step of a path; its files do not exist yet."""
    if where.step is None or where.attempt is not None:
        return False
    saves = _open_run(where)
    return saves is not None and saves.is_staged(where.step)


def _note_loaded(where: TierPath, checkpoint: KnownCheckpoint) -> None:
    """Record a loaded step: reading its metadata counts as loading it. A start that has saved nothing continues from
    it."""
    saves = _open_run(where)
    if checkpoint.commit is None:
        return
    loaded = (checkpoint.id, checkpoint.commit.lineage.ordinal)
    if saves is None:
        _loaded[where.run] = loaded
    else:
        saves.note_loaded(*loaded)
