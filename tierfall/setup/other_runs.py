"""The other runs on the tiers of a run that has no checkpoint there: it may have been renamed.

Only tiers of files are looked at, by one listing of the tier's folder; the hint ``latest`` of a run names its newest
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from tierfall.config import Config
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.stored import StoredTier

LOOK_S = 2.0
"""Seconds that a tier has to answer."""
FOLDERS_MAX = 1000
NAMED_MAX = 3


def describe_other_runs(config: Config, stores: Mapping[str, StoredTier], *, but: str) -> str:
    """Return the runs other than ``but`` that wrote last, three at most, each with its newest checkpoint; empty where
    there are none, or where no tier answers in time."""
    folders = {t.name: t.folder for t in config.stored if t.folder is not None and t.name in stores}
    calls = {
        name: partial(_find_runs, stores[name], folder, but) for name, folder in folders.items()
    }
    found: dict[str, tuple[float, CheckpointId]] = {}
    answers = BoundedCalls().call_all(calls, dict.fromkeys(calls, LOOK_S), doing="list the runs")
    for answer in answers.values():
        for run, (written_s, newest) in (answer.value or {}).items():
            known_s, known = found.get(run, (written_s, newest))
            found[run] = max(written_s, known_s), max(newest, known)
    latest_first = sorted(found, key=lambda run: found[run], reverse=True)
    return ", ".join(f"{run} (newest {found[run][1]})" for run in latest_first[:NAMED_MAX])


def _find_runs(store: StoredTier, folder: Path, but: str) -> dict[str, tuple[float, CheckpointId]]:
    """Return the runs in a tier's folder that wrote ``latest`` last, three at most, with its time and what it names."""
    with os.scandir(folder) as entries:
        names = [each.name for each in islice(entries, FOLDERS_MAX) if each.name != but]
    written_s: dict[str, float] = {}
    for name in names:
        try:
            written_s[name] = os.lstat(folder / name / keys.LATEST_NAME).st_mtime
        except OSError:  # no run, or one without a checkpoint
            continue
    found: dict[str, tuple[float, CheckpointId]] = {}
    for name in sorted(written_s, key=lambda run: written_s[run], reverse=True):
        if len(found) == NAMED_MAX:
            break
        run = StoredTier(name=store.name, run=name, backend=store.backend, read_only="other run")
        try:
            newest = run.latest.read()
        except TierfallError:  # not a file of tierfall
            continue
        if newest is not None:
            found[name] = written_s[name], newest
    return found
