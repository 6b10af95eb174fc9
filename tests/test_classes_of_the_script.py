"""Classes that the training script defines: other programs load the weights all the same, and the values of these
classes if they can import them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import forked

TRAIN = """
import dataclasses, enum, collections
import torch, tierfall

Pair = collections.namedtuple("Pair", "left right")

@dataclasses.dataclass
class Progress:
    step: int = 0
    average: object = None

class Phase(enum.Enum):
    WARM = 1
    MAIN = 2

class Money:
    def __init__(self, cents):
        self.cents = cents

tierfall.register_codec(Money, "Money", lambda money: money.cents, Money)

def main():
    progress, phase, money = Progress(), Phase.WARM, Money(0)
    state = {
        "model": torch.nn.Linear(2, 2), "progress": progress, "phase": phase, "pair": Pair(0, 0), "money": money,
        "counts": {Phase.WARM: 0}, "moments": {Phase.WARM: torch.zeros(2)},
    }
    with tierfall.open("tiers.yaml") as ckpt:
        report = ckpt.restore(state)
        step = report.step + 1 if report else 1
        progress, phase, money = state["progress"], state["phase"], state["money"]
        print(step, progress.step, phase.name, state["pair"].left, money.cents, state["counts"][Phase.WARM], flush=True)
        state["progress"] = Progress(step, torch.full((2,), float(step)))
        state["phase"], state["pair"], state["money"] = Phase.MAIN, Pair(step, "right"), Money(step)
        state["counts"][Phase.WARM] = step
        state["moments"][Phase.WARM].fill_(step)
        ckpt.save(step, state, block=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.py, which has saved steps 1 and 2."""
    root = tmp_path_factory.mktemp("project")
    (root / "train.py").write_text(TRAIN)
    (root / "tiers.yaml").write_text(
        f"run: run\ntiers:\n  - {{name: host, kind: host, folder: {root}/memory}}\n"
        "  - {name: disk, kind: file, path: ./disk}\n"
    )
    assert start(root, "train.py") == "1 0 WARM 0 0 0"
    assert start(root, "train.py") == "2 1 MAIN 1 1 1"
    return root


def start(root: Path, *command: str) -> str:
    """Run a program to its end, and return its first line."""
    done = forked.run(command, cwd=root)
    assert done.returncode == 0, done.stderr
    for kind in ("Progress", "Phase", "Pair", "Money"):
        warned = f"is of a class of this script, {kind}" in done.stderr
        assert warned == (command[0] != "-c"), done.stderr
    return done.stdout.partition("\n")[0]


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_an_export_has_plain_values_in_place_of_unknown_classes(project: Path, format: str) -> None:
    command = ["-m", "tierfall", "export", "2", "--to", format, "--format", format]
    done = forked.run([*command, "--config", "tiers.yaml"], cwd=project)
    assert done.returncode == 0, done.stderr
    assert "values of train.Progress are exported as plain values" in done.stdout + done.stderr
    if format == "torch":
        (path,) = (project / "torch").iterdir()
        found = torch.load(path, weights_only=False)
        assert found["progress"]["step"] == 2
        assert (found["phase"], found["pair"], found["money"]) == ("MAIN", (2, "right"), 2)
