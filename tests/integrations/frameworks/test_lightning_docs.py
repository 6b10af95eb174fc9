"""docs/lightning.md: its program runs, and goes on when it is started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/lightning.md").read_text()


def test_the_program_of_the_page_goes_on(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "tiers.yaml").write_text(config)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for epochs, steps in ((2, 64), (3, 96)):
        (tmp_path / "train.py").write_text(code.replace("max_epochs=2", f"max_epochs={epochs}"))
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.splitlines()[-1] == f"trained to step {steps}"
        assert ("Restored all states from the checkpoint at" in done.stderr) is (epochs == 3)
