"""Groups of nodes with parity, as the nodes of a start meet; what cannot be formed so is an error on all ranks.
Each rank is a thread of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_peer_placement import config_of, met, refusals
from tierfall.core.ranks.domains import node_name
from tierfall.setup.peers import PeerMemory
from tierfall.setup.places import run_folder, seen_by_one


def group_of(group: int, losses: int = 1) -> dict[str, int]:
    return {"group": group, "losses": losses}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERFALL_DOMAIN", raising=False)


@pytest.mark.parametrize("losses", [1, 2])
def test_documents_are_copied_to_as_many_as_may_be_lost(tmp_path: Path, losses: int) -> None:
    with met(tmp_path, 4, parity=group_of(4, losses)) as found:
        for node, one in enumerate(found):
            assert isinstance(one, PeerMemory)
            assert one.groups is not None
            assert sorted(one.groups.of(node)) == [0, 1, 2, 3]
            (own, *others) = one.placement.holders[node]
            assert own == node
            assert len(set(others) - {node}) == losses


def test_a_group_that_is_larger_than_the_nodes_is_refused(tmp_path: Path) -> None:
    (text,) = refusals(tmp_path, 3, parity=group_of(4))
    assert "parity.group is 4, and there are 3 nodes. Start on at least 4 nodes" in text


def test_one_node_alone_leaves_the_tier_out(tmp_path: Path) -> None:
    with met(tmp_path, 1, parity=group_of(4)) as found:
        assert found == [None]


def test_racks_that_are_too_few_are_refused(tmp_path: Path) -> None:
    (text,) = refusals(tmp_path, 4, ["a", "b", "a", "b"], spread="rack", parity=group_of(4))
    assert "parity is for 1 lost nodes of 4, and the nodes are in 2 (ar, br)" in text
    assert "Start in at least 4, set parity.group to less, or spread to node" in text


def test_racks_that_parity_survives_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    racks = ["a", "b", "a", "b"]
    with met(tmp_path, 4, racks, spread="rack", parity=group_of(4, 2)) as found:
        assert all(isinstance(one, PeerMemory) for one in found), found
    assert "may be lost" not in caplog.text


def test_a_rack_that_is_too_large_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with met(tmp_path, 4, ["a", "a", "a", "b"], spread="rack", parity=group_of(2)) as found:
        assert all(isinstance(one, PeerMemory) for one in found), found
    (said,) = [text for text in caplog.messages if "may be lost" in text]
    assert "a rack has more nodes than the 1 that may be lost" in said


@pytest.mark.parametrize("kept", [{}, {"parity": group_of(2)}])
def test_nodes_that_share_a_folder_are_refused(tmp_path: Path, kept: dict[str, Any]) -> None:
    """What they keep would be lost together, and overwritten."""
    (text,) = refusals(tmp_path, 2, path=str(tmp_path / "one"), **kept)
    assert f"node 0 ({node_name()}), node 1 ({node_name()}) have one folder" in text


def test_a_folder_of_parity_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    kept = tmp_path / "peers-1" / run_folder(config_of(tmp_path, 1), "run").name
    kept.mkdir(parents=True, mode=0o700)
    (kept / "parity").touch()
    (text,) = refusals(tmp_path, 2, parity=group_of(2))
    assert "rank 1: tier peers: folder" in text


def test_the_id_of_a_nodes_memory_stays(tmp_path: Path) -> None:
    ids: list[Any] = []
    for _ in range(2):
        with met(tmp_path, 2, parity=group_of(2)) as found:
            assert all(isinstance(one, PeerMemory) for one in found), found
            ids.append(
                [next(tmp_path.glob(f"peers-{n}/*/memory-id")).read_text() for n in range(2)]
            )
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]


def test_a_process_that_does_not_meet_the_others_leaves_the_tier_out(tmp_path: Path) -> None:
    """Parity without the other nodes says nothing."""
    config = config_of(tmp_path, 0, parity=group_of(2))
    (tmp_path / "peers-0" / run_folder(config, "run").name).mkdir(parents=True)
    assert seen_by_one(config).peers is None
