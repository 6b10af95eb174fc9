"""Which nodes keep the copies of a node's images: as many as ``copies``, apart by ``spread``; what cannot be placed so
is an error on all ranks; which losses they survive. Each rank is a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.core.ranks.threads import network, on_all
from tierfall.config import Config
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Geometry
from tierfall.core.ranks.addresses import own_address
from tierfall.core.ranks.domains import node_name
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.core.types.view import PeerSurvival, SurvivalChance
from tierfall.setup import peers
from tierfall.setup.peers import PeerMemory, close_peers, meet_peers
from tierfall.telemetry.reports import describe_peer_survival
from tierfall.tiers.image_file import IMAGE_START


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERFALL_DOMAIN", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(name, raising=False)


def config_of(folder: Path, rank: int, **peer: Any) -> Config:
    tiers = [
        {"name": "host", "kind": "host", "folder": str(folder / f"memory-{rank}")},
        {"name": "peers", "kind": "peer", "path": str(folder / f"peers-{rank}"), **peer},
        {"name": "pfs", "kind": "file", "path": str(folder / "pfs"), "shared": True},
    ]
    return Config.model_validate({"run": "run", "tiers": tiers})


@contextmanager
def met(
    folder: Path, nodes: int, domains: Sequence[str] = (), **peer: Any
) -> Iterator[list[PeerMemory | BaseException | None]]:
    """Let the nodes meet, one rank on each; ``domains``: by a file of labels, one for each node."""
    configs = []
    for rank in range(nodes):
        if domains:
            labels = folder / f"labels-{rank}"
            labels.write_text(f"{node_name() if domains[rank] else 'other'} {domains[rank]}r\n")
            peer["domains"] = str(labels)
        configs.append(config_of(folder, rank, **peer))
    with network(range(nodes)) as ranks:
        calls = [
            lambda c=config, r=rank: meet_peers(c, r)[1]  # type: ignore[misc]
            for config, rank in zip(configs, ranks, strict=True)
        ]
        found = on_all(calls)
        try:
            yield found
        finally:
            for one in found:
                if isinstance(one, PeerMemory):
                    close_peers(one)


def placed(folder: Path, nodes: int, domains: Sequence[str] = (), **peer: Any) -> Any:
    with met(folder, nodes, domains, **peer) as found:
        assert all(isinstance(one, PeerMemory) for one in found), found
        placements = [one.placement for one in found if isinstance(one, PeerMemory)]
        assert all(one == placements[0] for one in placements)
        return placements[0]


def test_domains_from_several_sources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "s1.tux1")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
    (tmp_path / "labels").write_text(f"{node_name()} r1\n")
    configs = [
        config_of(tmp_path, rank, spread="rack", **more)
        for rank, more in enumerate(({}, {"domains": str(tmp_path / "labels")}))
    ]
    with network(range(2)) as ranks:
        pairs = zip(configs, ranks, strict=True)
        found = on_all([lambda c=c, r=r: meet_peers(c, r) for c, r in pairs])  # type: ignore[misc]
    (text,) = {str(one) for one in found}
    assert "given by SLURM_TOPOLOGY_ADDR on node 0" in text
    assert "and domains on node 1" in text


def test_a_domain_that_is_too_large_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = placed(tmp_path, 4, ["a", "a", "a", "b"], spread="rack")
    assert placement.crowded
    (said,) = [text for text in caplog.messages if "share a rack" in text]
    for node in range(4):
        assert (f"node {node} " in said) == (node in placement.crowded)
    assert "3 of 4 nodes are in ar" in said
    assert "no rack may have more than 2" in said


# Addresses -------------------------------------------------------------------------------------------


def test_a_machine_whose_own_name_leads_to_itself_is_reached_by_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name of rank 0's machine does there, where /etc/hosts has 127.0.1.1 for it."""
    own = iter(["127.0.1.1", "10.0.0.2", "10.0.0.3"])
    asked = []

    def towards(other: str) -> str:
        asked.append(other)
        return "10.0.0.1"

    monkeypatch.setattr(peers, "own_address", lambda interface: next(own))
    monkeypatch.setattr(peers, "address_towards", towards)
    with met(tmp_path, 3) as found:
        served = [{rank.host for node in one._nodes for rank in node} for one in found]  # type: ignore[union-attr]
    assert served == [{"10.0.0.1", "10.0.0.2", "10.0.0.3"}] * 3
    assert len(asked) == 1
    assert asked[0] in {"10.0.0.2", "10.0.0.3"}


@pytest.mark.parametrize("interface", ["lo", "::1/128"])
def test_images_travel_on_the_network_that_is_named(tmp_path: Path, interface: str) -> None:
    try:
        address = own_address(interface)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with met(tmp_path, 2, interface=interface) as found:
        assert {rank.host for one in found for node in one._nodes for rank in node} == {address}  # type: ignore[union-attr]
        with closing(found[0].open_tier(RateLimiter(None))) as tier:  # type: ignore[union-attr]
            cut = Geometry(image_bytes=4, data_start=1, chunk_bytes=4096)
            image = tier.create_shard(CheckpointId(1, 1), Shard(0, 2), cut, Spliced(b"[]"))
            image.write_chunks(0, 0, memoryview(b"sent"))
            (arrived,) = tmp_path.glob("peers-1/**/*.image")
            assert arrived.read_bytes()[IMAGE_START : IMAGE_START + 4] == b"sent"


# Scale ----------------------------------------------------------------------------------------------


RANKS, LOCAL = 10_000, 8
NODES = RANKS // LOCAL


# What is told of it ---------------------------------------------------------------------------------


def chance(losses: int, probability: float, *, exact: bool = True) -> SurvivalChance:
    return SurvivalChance(losses=losses, probability=probability, exact=exact)


@pytest.mark.parametrize(
    ("certain", "chances", "text"),
    [
        (1, [chance(1, 1), chance(2, 14 / 15), chance(3, 0.8)],
         "the loss of any 1 node; of 2 with 93.3%, of 3 with 80%"),
        (2, [chance(1, 1), chance(2, 1), chance(3, 1 - 1e-15)],
         "the loss of any 2 nodes; of 3 with 99.9%"),
        (1, [chance(1, 1), chance(2, 0.61, exact=False), chance(3, 0, exact=False)],
         "the loss of any 1 node; of 2 with at least 61%"),
        (1, [chance(1, 1), chance(2, 0)], "the loss of any 1 node"),
        (0, [chance(1, 0)], "no loss of a node for certain"),
    ],
)  # fmt: skip
def test_losses_of_nodes_are_never_rounded_up(
    certain: int, chances: list[SurvivalChance], text: str
) -> None:
    found = PeerSurvival(
        tier="peers", step=1200, attempt=3, certain=certain, chances=tuple(chances)
    )
    assert describe_peer_survival(found) == f"peers: 1200@3 survives {text}"
