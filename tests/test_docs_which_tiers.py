"""docs/which-tiers.md: each of its files is valid, and declares what its text and its table say. So are the files of
all other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tierfall.config import Config, load_config
from tierfall.core.types.values import TierKind

PAGE = Path(__file__).resolve().parents[1] / "docs" / "which-tiers.md"
TEXT = PAGE.read_text()
FILES = dict(re.findall(r"^```yaml\n# ([\w-]+)\.yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
NAMES = {"SLURM_JOB_NAME": "7b", "JOB_NAME": "gpt"}
KINDS = {
    "laptop": ["host", "file"],
    "one-node": ["host", "file", "file"],
    "slurm": ["host", "file", "file"],
    "kubernetes": ["host", "object"],
    "spot": ["host", "object"],
}


def settings(name: str, folder: Path) -> Config:
    (folder / "tiers.yaml").write_text(FILES[name])
    return load_config(folder / "tiers.yaml", environ=NAMES)


def test_there_is_a_file_for_each_machine() -> None:
    assert set(FILES) == set(KINDS)
    assert len(re.findall(r"^## ", TEXT, re.MULTILINE)) == len(FILES) == TEXT.count("```yaml")


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_valid_and_has_the_chain_of_the_table(name: str, tmp_path: Path) -> None:
    assert [tier.kind.value for tier in settings(name, tmp_path).chain] == KINDS[name]


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"laptop"}))
def test_all_but_the_laptop_survive_the_loss_of_the_node(name: str, tmp_path: Path) -> None:
    last = settings(name, tmp_path).stored[-1]
    assert last.shared or last.kind is TierKind.OBJECT


ROOT = PAGE.parents[1]
SHOWN = {
    page: re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.M)
    for page in ["README.md", *(f"docs/{page.name}" for page in sorted(PAGE.parent.glob("*.md")))]
} | {"examples/tiers.yaml": [(ROOT / "examples/tiers.yaml").read_text()]}
WITHOUT_RULES = {"docs/torchtitan.md", "docs/command-line.md"}
"""An adapter gives each tier TorchTitan's ``keep_latest_k``; ``check`` shows when tiers without a rule are full."""


@pytest.mark.parametrize("page", SHOWN)
def test_each_file_that_is_shown_is_valid_and_right_to_copy(page: str) -> None:
    """It fills no disk, and has host memory in none of the project's folders."""
    environ = {name: "x" for block in SHOWN[page] for name in re.findall(r"\$\{env:(\w+)\}", block)}
    for block in SHOWN[page]:
        shown = yaml.safe_load(block)
        if not (isinstance(shown, dict) and "tiers" in shown):
            continue
        if "plugins" not in shown:
            load_config({"run": "x", **shown}, environ=environ)
        host, *tiers = shown["tiers"]
        assert host.get("folder", "/dev/shm").startswith("/dev/shm")
        stored = [tier for tier in tiers if tier["kind"] != "peer"]
        assert page in WITHOUT_RULES or all("retain" in tier for tier in stored)
