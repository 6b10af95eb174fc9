"""What ``attach`` adds to a Trainer: what a save consists of, and what a restore does."""

from __future__ import annotations

import itertools
import json
import logging
import random
import shutil
import tempfile
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.trainer_callback import ExportableState  # type: ignore[import-not-found]

from tierfall import Checkpointer, RestoreReport
from tierfall.errors import ConfigError, IntegrityError, RestoreError
from tierfall.integrations import keeping

logger = logging.getLogger("tierfall")


class TrainerJson:
    """What ``trainer_state.json`` holds, as an object of the state: it is converted by a save, and at no other step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored = ""

    def state_dict(self) -> dict[str, str]:
        callbacks = (*self._trainer.callback_handler.callbacks, self._trainer.control)
        exported = [x for x in callbacks if isinstance(x, ExportableState)]
        # ``vars``, since ``asdict`` copies each entry of the log.
        return {"json": json.dumps(vars(replace(self._trainer.state, stateful_callbacks=exported)))}

    def load_state_dict(self, values: dict[str, str]) -> None:
        self.restored = values["json"]


@dataclass(slots=True, kw_only=True)
class Attached:
    """What a Trainer saves to, and the checkpoint that is ``restored``; ``folder`` leads to it. None in a new run."""

    ckpt: Checkpointer
    extra: dict[str, Any]
    kept: TrainerJson
    restored: RestoreReport | None
    step: int | None  # the step that attach was given
    folder: str | None = None
    begun: bool = False
    last: int | None = None  # the step that was saved or restored last
    model: Any = None  # as it was prepared for the restore

    def begin(self, trainer: Any) -> None:
        """Begin a new run, or make the folder that Trainer resumes from, which is deleted with the Trainer at the
        latest."""
        if self.restored is None:
            self.ckpt.begin()
            return
        self.folder = tempfile.mkdtemp(prefix="tierfall-", suffix=f"-{self.restored.step}")
        weakref.finalize(trainer, shutil.rmtree, self.folder, ignore_errors=True)
        self.write_json()

    def resumes_from(self, folder: Any) -> Any:
        """Return what a ``train`` that is given ``folder`` resumes from. Raises ConfigError if it would begin anew."""
        found = self.folder if folder is True else folder or None
        if self.begun or (self.folder is not None and found != self.folder):
            raise ConfigError(
                f"train: the run has checkpoints: pass what attach(trainer, ckpt) returns, once; not {folder}. To "
                "begin anew, open another run, or this one with fresh=True"
            )
        return found

    def write_json(self) -> None:
        """Write what Trainer reads of the checkpoint. Trainer looks for the folder of the best one: there is none."""
        assert self.folder is not None
        found = json.loads(self.kept.restored) | {"best_model_checkpoint": None}
        Path(self.folder, "trainer_state.json").write_text(json.dumps(found))

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all but the random state, from which Trainer draws until the first batch: the newest checkpoint that
        is whole, or the step that was named."""
        at = self.restored
        assert at is not None
        step, attempt = (None, None) if self.step is None else (at.step, at.attempt)
        drawn = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        try:
            found = self.ckpt.restore(state, step=step, attempt=attempt)
        except (IntegrityError, RestoreError) as error:
            error.add_note(
                "attach(trainer, ckpt, step=N) resumes from step N: `tierfall ls` lists what there is"
            )
            raise
        assert found is not None  # attach found one
        # ``skip=["rng"]`` is an error where another number of ranks saved: it has no random state for these.
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        self.restored, self.last = found, found.step
        self.write_json()
        self.ckpt.begin()  # no warning of the loader: its order follows from seed and step

    def load_best(self, best: keeping.Best, named: int, state: dict[str, Any]) -> None:
        """Restore the best model that there is. Trainer names the step that was the best, whether it was saved or not;
        of equal ones, retention keeps the newest."""
        step = keeping.best_step(self.ckpt, best, named)
        if step is None:
            missing = keeping.missing_for(self.ckpt, best)
            raise RestoreError(
                f"load_best_model_at_end: no checkpoint has the metric {best.metric}: save at steps that are evaluated"
                + (missing and f", and write {missing}")
            )
        if step != named:
            logger.warning(
                "load_best_model_at_end: there is no checkpoint of step %d: that of step %d is loaded, the best by %s "
                "that there is",
                named,
                step,
                best.metric,
            )
        self.ckpt.restore(state, step=step, only=["model"])


def metrics_at(step: int, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that were logged at a step. Entries of a callback's own may have no step."""
    named = (entry for entry in reversed(log) if "step" in entry)
    entries = [*itertools.takewhile(lambda entry: entry["step"] == step, named)]
    logged = ((k, x) for entry in reversed(entries) for k, x in entry.items() if k != "step")
    return {k: x for k, x in logged if isinstance(x, int | float)}
