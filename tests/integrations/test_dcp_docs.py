"""docs/torch-distributed-checkpoint.md: its example prints what the page shows; it names every argument."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.dcp_help import QUIET
from tierfall.integrations import dcp

TEXT = (Path(__file__).resolve().parents[2] / "docs/torch-distributed-checkpoint.md").read_text()


@pytest.mark.filterwarnings(QUIET)
def test_the_example_prints_what_the_page_shows(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (config,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    own = f'kind: host, folder: "{memory}"}}'
    Path("tiers.yaml").write_text(config.replace("kind: host}", own))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    output = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(output):
        exec(compile(code, "the page", "exec"), names)
    shown = re.findall(r"^ *# (.*)$", code, re.MULTILINE)
    assert output.getvalue().splitlines() == shown


@pytest.mark.parametrize("name", sorted(dcp.__all__))
def test_the_page_names_what_there_is(name: str) -> None:
    made = getattr(dcp, name)
    assert f"`{name}" in TEXT
    assert inspect.getdoc(made)
    if made.__module__.endswith(("reader", "writer")):
        for parameter in list(inspect.signature(made).parameters)[1:]:
            assert f"`{parameter}" in TEXT, parameter
