"""docs/hugging-face.md: its script is killed, started again, and trains as one that was not stopped; its loop runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import set_seed

from tests.integrations.frameworks import hugging_face as made
from tierfall.integrations.accelerate import state_of
from tierfall.integrations.transformers import attach

pytestmark = pytest.mark.quick
TEXT = (Path(__file__).resolve().parents[3] / "docs/hugging-face.md").read_text()
SCRIPT, LOOP = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def in_memory(folder: Path) -> str:
    """The page's file, with host memory in a folder of the test."""
    return CONFIG.replace("kind: host}", f'kind: host, folder: "{folder}"}}')


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "tiers.yaml").write_text(in_memory(folder / "memory"))
    (folder / "train.py").write_text(SCRIPT)
    with (folder / "errors").open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def losses(lines: Any) -> list[str]:
    return [found[1] for line in lines if (found := re.search(r"'loss': '?([\d.e-]+)", line))]


def test_the_script_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole, _ = start(tmp_path / "whole").communicate(timeout=120)
    expected = losses(whole.splitlines())
    assert len(expected) == 60
    with start(tmp_path / "killed") as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if "'loss'" in line and "'epoch': '0.5'" in line:
                killed.kill()
                break
    again, _ = start(tmp_path / "killed").communicate(timeout=120)
    rest = losses(again.splitlines())
    assert 0 < len(rest) < 60, (tmp_path / "killed" / "errors").read_text()
    assert rest == expected[-len(rest) :]
    assert (tmp_path / "killed" / "out" / "final" / "model.safetensors").exists()
    assert [*(tmp_path / "killed").glob("tierfall-*")] == [], "a temporary folder is left"


class Stopped(Exception):
    """Ends a training as a kill does: nothing is saved after it."""


def loop(folder: Path, memory: Path, last: int = 0) -> list[str]:
    """Run the loop of the page, up to a step; return the loss of each step, exactly."""
    folder.mkdir(exist_ok=True)
    config = "interval: {every: 5}\n" + in_memory(memory / folder.name)
    (folder / "tiers.yaml").write_text(config.replace("./checkpoints", str(folder)))
    set_seed(1)
    model, losses = made.model(), list[str]()

    def record(module: Any, args: Any, output: Any) -> None:
        losses.append(output.loss.item().hex())
        if names["step"] == last:
            raise Stopped

    model.register_forward_hook(record)
    shuffled = torch.utils.data.DataLoader(
        made.rows(), batch_size=4, shuffle=True, collate_fn=made.collate
    )
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": shuffled}
    code = LOOP.replace('"tiers.yaml"', repr(str(folder / "tiers.yaml")))
    with suppress(Stopped):
        exec(compile(code, "the page", "exec"), names)
    return losses


@pytest.mark.filterwarnings("default")
def test_the_loop_of_accelerate_resumes_exactly_within_an_epoch_and_between_two(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has three epochs of 10 steps, and saves each fifth. It has no warning about the order of the batches."""
    whole = loop(tmp_path / "whole", memory)
    assert len(whole) == 30
    for last in (11, 17, 23):  # from steps 10, 15 and 20
        loop(tmp_path / f"{last}", memory, last)
        rest = loop(tmp_path / f"{last}", memory)
        assert len(rest) == 30 - last // 5 * 5
        assert rest == whole[-len(rest) :]
    assert "shuffles" not in caplog.text


@pytest.mark.parametrize("call", [attach, state_of])
def test_the_page_names_what_there_is(call: Any) -> None:
    assert inspect.getdoc(call)
    for parameter in inspect.signature(call).parameters:
        assert re.search(rf"\b{parameter}\b", TEXT), parameter
