"""Trainings by Megatron-Core, killed and started again: every loss is that of an uninterrupted run, in each layout."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.integrations.frameworks.test_megatron import (  # noqa: F401
    IMPORTS,
    Start,
    answers_of,
    start,
)

LAYOUTS = {"TP 2 x PP 2": (2, 2), "DP 4": (1, 1), "TP 2 x DP 2": (2, 1)}


def losses(folder: Path, life: str) -> dict[str, dict[int, str]]:
    return {
        path.name.split("-")[-1]: dict(
            (int(step), loss) for step, loss in map(str.split, path.read_text().splitlines())
        )
        for path in folder.glob(f"{life}-[0-9]")
    }


def wholes(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Put the tensors together that the ranks have dumped. Replicas must be equal."""
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for path in folder.glob(f"{name}-*.pt"):
        for key, shape, offset, prepended, data in torch.load(path, weights_only=True):
            whole = found.setdefault(key, torch.empty(shape, dtype=data.dtype))
            seen = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            lengths = (1,) * prepended + tuple(data.shape)
            at = tuple(slice(a, a + n) for a, n in zip(offset, lengths, strict=True))
            data = data.view(lengths)
            assert torch.equal(whole[at][seen[at]], data[seen[at]]), key
            whole[at], seen[at] = data, True
    assert found
    assert all(map(torch.all, filled.values()))
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout", [pytest.param(e, marks=[pytest.mark.quick] * (e == "DP 4")) for e in LAYOUTS]
)
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(
    start: Start,  # noqa: F811
    tmp_path: Path,
    layout: str,
) -> None:
    """And other layouts load its values, and train on."""
    tp, pp = LAYOUTS[layout]
    mixed = layout == "TP 2 x PP 2"
    given = {"tp": tp, "pp": pp, "is_async": layout != "DP 4", "mixed": mixed}
    drawn = random.Random(layout)
    whole = answers_of(start("whole", "train", life="whole", **given))
    assert all(a["lazy"][0] == 0 and a["lazy"][1] > 0.6 for a in whole), whole
    folder = tmp_path / "run"
    job = start("run", "train", life="random", pause_s=0.05, waits_at=11, **given)
    count = drawn.randint(5, 10)
    job.wait_until(lambda: any(len(x) >= count for x in losses(folder, "random").values()))
    job.wait_until(lambda: any((folder / "disk").rglob("commit.json")))
    job.kill()
    point, victim = drawn.choice(["capture", "seal", "sealed", "flush"]), drawn.randrange(4)
    job = start("run", "train", life="inside", point=point, victim=victim, **given)
    job.wait_for_kill()
    job.kill()
    for answer in answers_of(start("run", "train", life="last", **given)):
        assert (answer.get("step"), answer["newest"] % 4) == (12, 0), answer
    of_whole = losses(tmp_path / "whole", "whole")
    for life in ("random", "inside", "last"):
        for rank, found in losses(folder, life).items():
            assert found.items() <= of_whole[rank].items(), (life, rank, point)
    trained = wholes(folder, "last-trained")
    assert equal(trained, wholes(tmp_path / "whole", "whole-trained"))
    images = [*folder.glob("disk/mcore/step-00000012-*/*.safetensors")]
    headers = [int.from_bytes(image.read_bytes()[:8], "little") for image in images]
    data_bytes = sum(image.stat().st_size for image in images) - sum(headers)
    assert data_bytes < 1.2 * sum(each.nbytes for each in trained.values()), (
        "replicas are stored once"
    )
    shutil.rmtree(folder / "checkpoints")  # no tier needs it
    for name, (tp, pp) in LAYOUTS.items():
        if name != layout:
            answers = answers_of(
                start("run", "train", tp=tp, pp=pp, life=name, steps=13, rng=False, mixed=mixed)
            )
            assert [answer["step"] for answer in answers] == [13] * 4, answers
            assert equal(trained, wholes(folder, f"{name}-loaded"))
