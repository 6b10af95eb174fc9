"""The failure domain of a node: by the variable, by a file of labels, by Slurm, the first that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfall.core.ranks.domains import find_domain
from tierfall.core.types.errors import ConfigError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERFALL_DOMAIN", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "tux1.example.org")


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "racks.txt"
    path.write_text("# all of hall 2\ntux0 r1\n\ntux1\tr2  # moved\n")
    return path


def slurm(monkeypatch: pytest.MonkeyPatch, address: str, pattern: str) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", address)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)


def test_the_variable_comes_first_then_the_file_then_slurm(
    monkeypatch: pytest.MonkeyPatch, labels: Path
) -> None:
    slurm(monkeypatch, "s0.s4.s8.tux1", "switch.switch.switch.node")
    assert find_domain(None).name == "s8"
    assert find_domain(labels).name == "r2"
    monkeypatch.setenv("TIERFALL_DOMAIN", "r9")
    assert find_domain(labels).name == "r9"


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("s0.tux1", "switch.node", "s0"),
        ("s0.s4.tux1.example.org", "switch.switch.node", "s4"),
        ("tux1", "node", ""),
        ("tux1.example.org", "node", ""),
        ("s0.s4", "switch.switch", ""),
        ("tux1", "switch.node", ""),
        ("s0.tux1", "", ""),
    ],
)
def test_slurm_names_the_switch_before_the_node(
    monkeypatch: pytest.MonkeyPatch, address: str, pattern: str, domain: str
) -> None:
    slurm(monkeypatch, address, pattern)
    assert find_domain(None).name == domain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tux0 r1\n", "no line for this node, tux1.example.org"),
        ("tux1\n", "line 1 has 1 words; expected lines 'HOSTNAME DOMAIN'"),
        ("# two\ntux1 rack 2\n", "line 2 has 3 words"),
        ("tux1 r1\ntux1 r2\n", "line 2: tux1 is in r2, and in r1 before"),
    ],
)
def test_what_is_wrong_with_a_file_of_labels(labels: Path, text: str, says: str) -> None:
    labels.write_text(text)
    with pytest.raises(ConfigError, match=says):
        find_domain(labels)
