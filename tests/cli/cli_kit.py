"""What tests of the command line share: a way to run it, and a step that two nodes saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.contract import of_ranks
from tests.contract.kit import Answer
from tests.core.ranks.threads import network, on_all
from tests.steps import state_of
from tierfall.cli import app
from tierfall.config import Config
from tierfall.run.checkpointer import Checkpointer

ROOT = Path(__file__).resolve().parents[2]


class Cli:
    """Runs commands on one configuration."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "tiers.yaml"
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.path.write_text(json.dumps(config))

    def __call__(self, *words: str, code: int = 0, input: str | None = None) -> Answer:
        """Run a command and compare its exit code; ``code`` -1 takes any."""
        command, *rest = words
        arguments = [command, "--config", str(self.path), *rest]
        answer = run(arguments, input=input)
        assert code in (-1, answer.code), f"{words}: {answer.code}\n{answer.out}\n{answer.err}"
        return answer

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self(*words, "--json", code=code).document

    def steps(self) -> dict[str, dict[str, str]]:
        """``ls``: the state of every copy, by step and tier."""
        found = self("ls", "--json", code=-1).document["checkpoints"]
        return {
            f"{c['step']}@{c['attempt']}": {t: copy["state"] for t, copy in c["copies"].items()}
            for c in found
        }


def run(arguments: Sequence[str], input: str | None = None) -> Answer:
    """Run the command line inside this process."""
    result = CliRunner().invoke(app, arguments, input=input, env={"TIERFALL_CONFIG": ""})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def folder(root: Path, step: int = 1) -> Path:
    """The folder of a step of the first attempt on a tier."""
    return root / "run" / f"step-{step:08d}-a0001"


def save_on_two_nodes(tmp_path: Path) -> dict[str, Any]:
    """Save one step of two nodes; return the configuration of the first, which keeps its image in memory."""

    def config(node: str) -> dict[str, Any]:
        words = {"host": {"on_close": "keep"}, "max_wait": "10s"}
        return of_ranks.config(str(tmp_path), node, **words)

    def train(rank: int) -> None:
        made = Config.model_validate(config("ab"[rank]))
        with Checkpointer(made, ranks=ranks[rank]) as ckpt:
            ckpt.save(1, state_of(1), block=True)

    with network(["a", "b"]) as ranks:
        assert on_all([lambda r=r: train(r) for r in range(2)]) == [None, None]  # type: ignore[misc]
    return config("a")
