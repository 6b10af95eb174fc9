"""Classes that the training script defines: other programs load the weights all the same, and the values of these
classes if they can import them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierfall
from tests import forked
from tierfall.errors import RestoreError

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
EVALUATE = """
import sys, tierfall
loaded = tierfall.load("disk/run")
assert loaded["model"]["weight"].shape == (2, 2)
found = {key: loaded[key] for key in ("progress", "phase", "pair", "money")}
assert {type(each) for each in found.values()} == {tierfall.UnknownValue}
assert [each.name for each in found.values()] == ["train.Progress", "train.Phase", "train.Pair", "Money"]
assert found["progress"].value["step"] == 2 and found["progress"].value["average"].tolist() == [2.0, 2.0]
assert (found["phase"].value, found["pair"].value, found["money"].value) == ("MAIN", (2, "right"), 2)
assert "import train first" in found["phase"].reason and "register_codec" in found["money"].reason
(key,), (same,) = loaded["counts"], loaded["moments"]
assert (key, key.value, loaded["counts"][same]) == (same, "WARM", 2)
assert sorted(tierfall.load("disk/run", only=["model.weight", "counts"])) == ["counts", "model"]
with open("weights.txt", "w") as file:
    file.write(str(loaded["model"]["weight"].tolist()))

sys.path.insert(0, "")
import train
loaded = tierfall.load("disk/run")
assert loaded["progress"].__class__ is train.Progress and loaded["money"].cents == 2
assert (loaded["phase"], loaded["pair"]) == (train.Phase.MAIN, train.Pair(2, "right"))
assert loaded["counts"] == {train.Phase.WARM: 2}
train.main()
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


def test_other_programs_load_it_and_the_script_continues_under_other_names(project: Path) -> None:
    assert start(project, "-c", EVALUATE) == "3 2 MAIN 2 2 2"
    # What the imported module has saved, the script restores, also after it was moved into a package.
    assert start(project, "train.py") == "4 3 MAIN 3 3 3"
    (project / "package").mkdir()
    (project / "train.py").rename(project / "package" / "train.py")
    code = "import sys; sys.path.insert(0, ''); from package import train; train.main()"
    assert start(project, "-c", code) == "5 4 MAIN 4 4 4"


def test_an_entry_of_an_unknown_class_is_refused_by_name_and_can_be_skipped(
    project: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    host = {"name": "host", "kind": "host", "folder": str(project / "memory")}
    disk = {"name": "disk", "kind": "file", "path": str(project / "disk")}
    config = {"run": "run", "tiers": [host, disk]}
    state = {key: None for key in ("progress", "phase", "pair", "money", "counts", "moments")}
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError) as caught:
            ckpt.restore({"model": model, **state}, step=2)
        text = str(caught.value)
        for name in ("progress", "phase", "pair", "money", "counts", "moments"):
            assert f"\n  {name}" in text
        assert "import train first" in text
        assert "skip=['progress']" in text
        assert set(state.values()) == {None}
        ckpt.restore({"model": model, **state}, step=2, skip=[*state])
    assert torch.equal(
        model.weight, tierfall.load(project / "disk" / "run", step=2)["model"]["weight"]
    )


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
