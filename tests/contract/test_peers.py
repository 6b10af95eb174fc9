"""Peer memory: a lost node's images come back from the memory of others, as far as ``copies`` says.

Each of four ranks is a node with memory of its own, in folders. A node is lost with these folders. ``pfs`` gets no
copy unless a test says so: what is restored came from memory.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract import of_ranks
from tests.contract.kit import Answer, Crew, Raised, crew, flip, tierfall_command

SELDOM = {"flush": {"every": 100}}
TWO = {"copies": 2}
ONE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(tmp_path_factory.mktemp("nodes"), 4, [0, 1, 2, 3]) as ranks:
        yield ranks


class Nodes:
    """A run on these nodes."""

    def __init__(self, ranks: Crew, root: Path) -> None:
        self.ranks, self.root = ranks, root

    def train(self, *steps: int, peers: dict[str, Any] = ONE, **words: Any) -> list[Any]:
        """Continue from where the run is, and save these steps to peer memory; what each rank tells."""
        words = {"pfs": SELDOM, "wait": ["peers"], **words}
        return self.ranks.run(
            of_ranks.go_on, folder=str(self.root), steps=steps, peers=peers, **words
        )

    def refused(self, peers: dict[str, Any], **words: Any) -> list[Raised]:
        found = self.ranks.outcomes(
            of_ranks.go_on, folder=str(self.root), peers=peers, pfs=SELDOM, **words
        )
        assert all(isinstance(one, Raised) for one in found), found
        return found

    def lose(self, *lost: int) -> None:
        for node in lost:
            for kept in ("memory", "peers"):
                shutil.rmtree(self.root / f"{kept}-{node}")

    def images(self, rank: int, step: int) -> list[Path]:
        """The files in which other nodes keep a rank's image: they hold what only it holds."""
        marker = of_ranks.own(rank, step)["weights"]["w0"].numpy().tobytes()[:256]
        files = [p for p in self.root.glob("peers-*/**/*") if p.is_file()]
        return [path for path in sorted(files) if marker in path.read_bytes()]

    def command(self, node: int, *words: str, peers: dict[str, Any] = ONE, **more: Any) -> Answer:
        file = self.root / f"tiers-{node}.yaml"
        config = of_ranks.config(str(self.root), str(node), peers=peers, **{"pfs": SELDOM, **more})
        file.write_text(json.dumps(config))
        return tierfall_command(words[0], "--config", str(file), *words[1:])


@pytest.fixture
def run(nodes: Crew, tmp_path: Path) -> Nodes:
    return Nodes(nodes, tmp_path)


@pytest.fixture(scope="module")
def trained(nodes: Crew, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By the number of copies: the run with steps 1 and 2 in peer memory, and what its ranks told."""
    found: dict[int, list[Any]] = {}
    for copies, peers in ((1, ONE), (2, TWO)):
        made = Nodes(nodes, tmp_path_factory.mktemp(f"copies-{copies}"))
        found[copies] = [made, made.train(1, 2, peers=peers)]
        shutil.copytree(made.root, made.root.with_name(f"aside-{copies}"), symlinks=True)
    return found


@pytest.fixture
def begun(trained: dict[int, list[Any]]) -> Callable[..., Nodes]:
    """``begun(copies)``: that run, whatever other tests did to it."""

    def again(copies: int = 1) -> Nodes:
        made: Nodes = trained[copies][0]
        shutil.rmtree(made.root)
        shutil.copytree(made.root.with_name(f"aside-{copies}"), made.root, symlinks=True)
        return made

    return again


def check(found: list[Any], step: int, *, tiers: set[str] | None = None) -> None:
    """All ranks restored this step, bit for bit, from memory alone or from these tiers."""
    assert [(one["step"], one["good"]) for one in found] == [(step, True)] * len(found), found
    read = {tier for one in found for tier in one["tiers"]}
    assert read <= (tiers or {"host", "peers"}), read


# A node is lost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 3])
def test_a_lost_nodes_image_comes_back_from_another_nodes_memory(
    trained: dict[int, list[Any]], begun: Callable[..., Nodes], lost: int
) -> None:
    assert [one["known"][-1][2] for one in trained[1][1]] == [["host", "peers"]] * 4
    run = begun()
    run.lose(lost)
    check(run.train(), step=2)


def test_after_a_loss_the_next_start_makes_the_copies_again(begun: Callable[..., Nodes]) -> None:
    """Two nodes that keep each other's images are lost one after the other."""
    run = begun()
    run.lose(0)
    check(run.train(), step=2)
    pair = [n for n in (1, 2, 3) if any(f"peers-{n}" in str(p) for p in run.images(0, 2))]
    run.lose(pair[0])
    check(run.train(), step=2)


@pytest.mark.parametrize("lost", [(0, 1), (1, 3)])
def test_with_two_copies_any_two_nodes_may_be_lost(
    begun: Callable[..., Nodes], lost: tuple[int, int]
) -> None:
    run = begun(2)
    assert len(run.images(0, 2)) == 2
    run.lose(*lost)
    check(run.train(peers=TWO), step=2)


def test_more_losses_than_copies_cost_the_steps_since_storage(run: Nodes) -> None:
    run.train(1, 2, wait=["pfs"], pfs={})
    run.train(3)
    (keeper,) = run.images(0, 3)
    run.lose(0, int(keeper.relative_to(run.root).parts[0].rpartition("-")[2]))
    check(run.train(), step=2, tiers={"host", "peers", "pfs"})


def test_a_whole_rack_may_be_lost_if_copies_are_spread_over_racks(run: Nodes) -> None:
    rack = {"spread": "rack"}
    for domains in (["a", "a", "b", "b"], ["a", "b", "a", "b"]):
        place = Nodes(run.ranks, run.root / "".join(domains))
        place.root.mkdir()
        place.train(1, 2, peers=rack, domains=domains)
        place.lose(*(node for node in range(4) if domains[node] == "a"))
        check(place.train(peers=rack, domains=domains), step=2)


def test_nodes_that_come_back_in_other_places_or_fewer_find_their_images(
    begun: Callable[..., Nodes],
) -> None:
    run = begun()
    for kept in ("memory", "peers"):
        (run.root / f"{kept}-1").rename(run.root / "aside")
        (run.root / f"{kept}-2").rename(run.root / f"{kept}-1")
        (run.root / "aside").rename(run.root / f"{kept}-2")
    check(run.train(), step=2)
    memory = {node: (run.root / f"memory-{node}").exists() for node in range(4)}
    assert all(memory.values())


def test_memory_of_before_a_loss_is_not_taken_for_the_newer(begun: Callable[..., Nodes]) -> None:
    """A node is lost, and comes back with what it had; steps after that are restored from the others."""
    run = begun(2)
    for kept in ("memory", "peers"):
        shutil.copytree(run.root / f"{kept}-1", run.root / f"older-{kept}")
    run.lose(1)
    check(run.train(3, peers=TWO), step=2)
    run.lose(1)
    for kept in ("memory", "peers"):
        (run.root / f"older-{kept}").rename(run.root / f"{kept}-1")
    check(run.train(peers=TWO), step=3)


# Damage -------------------------------------------------------------------------------------------------


def test_a_damaged_copy_is_passed_over_for_another_and_else_an_older_step_is_restored(
    run: Nodes,
) -> None:
    run.train(1, wait=["pfs"], pfs={}, peers=TWO)
    run.train(2, peers=TWO)
    run.lose(0)
    shutil.copytree(run.root, run.root.with_name("aside"), symlinks=True)
    first, second = run.images(0, 2)
    marker = of_ranks.own(0, 2)["weights"]["w0"].numpy().tobytes()[:256]
    flip(first, first.read_bytes().index(marker))
    check(run.train(peers=TWO), step=2)
    shutil.rmtree(run.root)
    shutil.move(run.root.with_name("aside"), run.root)
    for path in (first, second):
        flip(path, path.read_bytes().index(marker))
    found = run.train(peers=TWO)
    check(found, step=1, tiers={"host", "peers", "pfs"})
    assert all(any("2@2" in text for text in one["fallbacks"]) for one in found), found


def test_a_kill_in_a_transfer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with crew(tmp_path, 2, [0, 1]) as ranks:
        words = {"folder": str(tmp_path), "pfs": SELDOM}
        ranks.run(of_ranks.go_on, steps=[1], wait=["peers"], peers=ONE, **words)
        ranks.run(of_ranks.stay, steps=[2], peers={"bandwidth": "2kB/s"}, **words)
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    with crew(tmp_path, 2, [0, 1]) as ranks:
        words = {"folder": str(tmp_path), "pfs": SELDOM, "peers": ONE}
        check(ranks.run(of_ranks.go_on, **words), step=1)


# What it survives ------------------------------------------------------------------------------------------


def test_statistics_and_ls_say_how_many_lost_nodes_it_survives(
    trained: dict[int, list[Any]], begun: Callable[..., Nodes]
) -> None:
    for peers, certain, chance in ((ONE, 1, "of 2 with 66.6%"), (TWO, 2, "")):
        place = begun(certain)
        for one in trained[certain][1]:
            survives = one["survives"]
            assert (survives["step"], survives["attempt"], survives["tier"]) == (2, 1, "peers")
            assert survives["certain"] == certain
            chances = {each["losses"]: each["probability"] for each in survives["chances"]}
            assert chances.get(certain, 1) == 1
            assert chances[certain + 1] < 1
        text = place.command(0, "ls", peers=peers).out
        assert f"peers: 2@1 survives the loss of any {certain} node" in text
        assert chance in text
        document = place.command(1, "ls", "--json", peers=peers).document
        assert document["peer_survival"]["certain"] == certain
    again = place.train(peers=peers)
    assert [one["survives"] for one in again] == [None] * 4, "not before its first commit"


def test_a_node_shows_frees_and_flushes_what_it_keeps_for_others(run: Nodes) -> None:
    run.train(1)
    (keeper,) = run.images(0, 1)
    node = int(keeper.relative_to(run.root).parts[0].rpartition("-")[2])
    (held,) = run.command(node, "runs", "--json").document["memory"]
    assert held["kept_bytes"] > 20_000
    others = [other for other in range(4) if other not in (0, node)]
    run.lose(0, others[0])
    shared = {"pfs": {}, "max_wait": "1s"}
    drained = [run.command(each, "drain", **shared) for each in (node, others[1])]
    assert drained[1].code == 0, f"the nodes that are left have all images: {drained[1].err}"
    assert (run.root / "pfs" / "run" / "step-00000001-a0001" / "commit.json").exists()
    for kept in run.root.glob("memory-*"), run.root.glob("peers-*"):
        for folder in kept:
            shutil.rmtree(folder)
    check(run.train(), step=1, tiers={"pfs"})


def test_a_clean_close_frees_memory_once_storage_has_the_newest(run: Nodes) -> None:
    run.train(1, 2, wait=["peers", "pfs"], pfs={})
    assert [path for rank in range(4) for path in run.images(rank, 2)] == []
    check(run.train(), step=2, tiers={"pfs"})


def test_storage_that_was_deleted_is_forgotten_by_each_node_which_keeps_for_its_user_alone(
    run: Nodes,
) -> None:
    every_second = {"flush": {"every": 2}}
    run.train(1, pfs=every_second)
    run.train(2, wait=["pfs"], pfs=every_second)
    run.train(3, pfs=every_second)
    assert all((run.root / f"peers-{node}").stat().st_mode & 0o077 == 0 for node in range(4))
    shutil.rmtree(run.root / "pfs")
    for node in range(4):
        answer = run.command(node, "forget", "pfs")
        assert "pfs is forgotten by this machine" in answer.out, answer.err
    check(run.train(), step=3)


# Who keeps what ----------------------------------------------------------------------------------------------


def test_a_placement_that_cannot_be_is_refused_on_all_ranks(run: Nodes) -> None:
    rack = {"spread": "rack"}
    for peers, domains, named in (
        ({"copies": 4}, None, "4"),
        (rack, None, "TIERFALL_DOMAIN"),
        (rack, ["a", "b", "a", ""], "rank 3|node 3|1 node|hostname"),
        (rack, ["a", "a", "a", "a"], "domain|rack"),
    ):
        for one in run.refused(peers, domains=domains):
            assert one.kind == "ConfigError"
            assert any(word in one.text for word in named.split("|")), one.text
    assert not (run.root / "pfs" / "run").exists() or not list(
        (run.root / "pfs" / "run").glob("step-*")
    )


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(run: Nodes) -> None:
    (run.root / "peers-1").touch()
    for one in run.refused(ONE):
        assert "tier peers: " in one.text, one


def test_one_node_alone_leaves_the_tier_out_and_does_not_begin_a_run_anew(
    nodes: Crew, tmp_path: Path, begun: Callable[..., Nodes]
) -> None:
    alone = {"members": [0], "pfs": SELDOM, "peers": ONE}
    new = nodes.run(of_ranks.go_on, folder=str(tmp_path / "new"), steps=[1], wait=["host"], **alone)
    assert new[0]["known"] == [[1, 1, ["host"]]]
    assert not (tmp_path / "new" / "peers-0").exists()
    found = nodes.outcomes(of_ranks.go_on, folder=str(begun().root), **alone)
    assert isinstance(found[0], Raised), found[0]
    assert found[0].kind == "RestoreError"
