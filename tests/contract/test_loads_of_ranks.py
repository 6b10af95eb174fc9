"""``tierfall.load(group=)``: the ranks of a job without training get one checkpoint, or the part that each names.

Four ranks on two nodes, which both see ``pfs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierfall
from tests.contract import of_ranks
from tests.contract.kit import Crew, equal, flip
from tierfall.errors import ConfigError, TierfallError

SHARED = "memfd:tierfall-load"


@pytest.fixture
def apart(four: Crew) -> Iterator[Crew]:
    four.nodes = [0, 0, 1, 1]
    yield four
    four.nodes = [0, 0, 0, 0]


def state() -> dict[str, Any]:
    def tensor(number: int) -> torch.Tensor:
        return torch.randn(40_000, generator=torch.Generator().manual_seed(number))

    weights: dict[str, Any] = {f"w{i}": tensor(i) for i in range(8)}
    odd = {"empty": torch.empty(0, 3), "across": tensor(9).view(200, 200).t()}
    return {"model": weights | odd, "extra": {"epoch": 3, "text": "x" * 5000}, "rng": None}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run that one process has saved."""
    with tierfall.open(of_ranks.config(str(tmp_path))) as ckpt:
        ckpt.save(1, state()).wait("pfs", 30)
    return tmp_path / "pfs" / "run"


# What a rank does ------------------------------------------------------------------------------------


def load(rank: int, place: str, only: Any = None, **how: Any) -> list[Any]:
    """The names that were loaded, whether they are what was saved, and the shared memory that they are in."""
    part = only and only[rank]
    try:
        loaded = tierfall.load(place, group=True, only=part, **how)
    except TierfallError as error:
        return [type(error).__name__, str(error)]
    expected = state()
    good = equal(
        {name: expected["model"][name] for name in loaded.get("model", {})},
        loaded.get("model", {}),
    ) and loaded.get("extra") in (None, expected["extra"])
    return [sorted(loaded.get("model", {})), good, shared_memory()]


def shared_memory() -> list[str]:
    """The memory that this process shares with others by a load: whether it is written through, and which it is."""
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({f"{row[1]} {row[4]}" for row in rows if SHARED in " ".join(row[5:])})


def load_and_write(rank: int, place: str) -> list[Any]:
    """Load; each rank writes its number to a tensor; what they have then."""
    loaded = tierfall.load(place, group=dist.new_group([0, 1, 2, 3]), share=True)
    model = loaded["model"]
    dist.barrier()
    model["w3"].fill_(rank)
    dist.barrier()
    expected = state()["model"] | {"w3": torch.full((40_000,), float(rank))}
    return [equal(model, expected), shared_memory()]


def load_by_one_of_two_words(rank: int, place: str) -> list[Any]:
    loaded = tierfall.load(place, group=dist.group.WORLD if rank else True)
    return [equal(loaded["model"], state()["model"])]


def load_at_other_steps(rank: int, place: str) -> list[Any]:
    return load(rank, place, step=1 + rank // 3)


def load_own(rank: int, folder: str, share: bool, shard: bool = False) -> Any:
    """Load from all tiers; or this rank's shard on ``pfs`` alone."""
    step = Path(folder, "pfs", "run", "step-00000001-a0001")
    place: Any = step / f"rank-{rank:05d}-of-00004.safetensors"
    try:
        loaded = tierfall.load(
            place if shard else of_ranks.config(folder),
            only=None if shard else [f"part{rank}"],
            group=True,
            share=share,
        )
    except TierfallError as error:
        return [type(error).__name__, str(error)]
    return sorted(name for name in loaded if equal(loaded[name], torch.full((9_000,), rank + 1.0)))


def save_own(rank: int, folder: str, tier: str, **words: Any) -> None:
    with tierfall.open(of_ranks.config(folder, **words)) as ckpt:
        own = {f"part{rank}": torch.full((9_000,), rank + 1.0), "rng": None}
        ckpt.save(1, own).wait(tier, 30)


def load_trained(rank: int, place: str, share: bool) -> str:
    return of_ranks.digest_of(tierfall.load(place, group=True, share=share))


# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
def test_each_rank_gets_the_part_that_it_names(apart: Crew, saved: Path, share: bool) -> None:
    only = [None, ["model.w1", "extra"], ["extra"], ["model.w7", "model.across", "model.empty"]]
    found = apart.run(load, place=str(saved), only=only, share=share)
    names = [[*sorted(state()["model"])], ["w1"], [], ["across", "empty", "w7"]]
    assert [one[:2] for one in found] == [[each, True] for each in names]


def test_shared_tensors_are_in_one_memory_of_the_node_and_private_when_written(
    apart: Crew, saved: Path
) -> None:
    found = apart.run(load_and_write, place=str(saved))
    assert [good for good, _ in found] == [True] * 4
    ((first,), (second,), (third,), (fourth,)) = (memory for _, memory in found)
    assert first.startswith("rw-p "), "nobody can write through to what others see"
    assert (first, third) == (second, fourth)
    assert first != third, "each node has its own"


def test_true_and_the_group_of_all_ranks_are_one_group(four: Crew, saved: Path) -> None:
    assert four.run(load_by_one_of_two_words, place=str(saved)) == [[True]] * 4


@pytest.mark.parametrize("layout", ["fsdp", "tp-fsdp"])
def test_sharded_tensors_are_returned_whole(apart: Crew, tmp_path: Path, layout: str) -> None:
    """Those of tensor parallelism are no rows of the whole."""
    words = {"folder": str(tmp_path), "layout": layout, "until": 2, "members": [0, 1, 2, 3]}
    trained = apart.run(of_ranks.train_model, **words)
    place = str(tmp_path / "pfs" / "run")
    for share in (False, True):
        found = apart.run(load_trained, place=place, share=share)
        assert found == [one["digest"] for one in trained], share


def test_what_only_another_node_has_comes_from_there(apart: Crew, tmp_path: Path) -> None:
    words = {"pfs": {"flush": {"every": 100}}}
    apart.run(save_own, folder=str(tmp_path), tier="nvme", **words)
    apart.nodes = [1, 1, 0, 0]
    for share in (False, True):
        found = apart.run(load_own, folder=str(tmp_path), share=share)
        assert found == [[f"part{rank}"] for rank in range(4)]


def test_each_rank_may_load_another_shard_but_not_into_one_memory(
    apart: Crew, tmp_path: Path
) -> None:
    words = {"folder": str(tmp_path), "shard": True}
    apart.run(save_own, folder=str(tmp_path), tier="pfs")
    found = apart.run(load_own, **words, share=False)
    assert found == [[f"part{rank}"] for rank in range(4)]
    for kind, text in apart.run(load_own, **words, share=True):
        assert kind == "RanksError"
        assert "asked for shard=" in text


def test_a_damaged_chunk_is_found_by_the_ranks_that_were_to_get_it(
    apart: Crew, saved: Path
) -> None:
    image = next(saved.glob("step-*/*.safetensors"))
    flip(image, image.stat().st_size // 2)
    for share in (False, True):
        for kind, text in apart.run(load, place=str(saved), share=share):
            assert kind == "RestoreError"
            assert "none of the checkpoints can be read whole" in text
            assert "does not match its digest" in text


def test_what_one_rank_asks_for_in_vain_all_ranks_say(apart: Crew, saved: Path) -> None:
    for share in (False, True):
        found = apart.run(load, place=str(saved), only=[None, ["model.x"], None, None], share=share)
        assert [kind for kind, _ in found] == ["RestoreError"] * 4
        assert all("model.x" in text for _, text in found)
    for kind, text in apart.run(load_at_other_steps, place=str(saved)):
        assert kind == "RanksError"
        assert "rank 3 asked for step=2" in text


def test_a_group_of_one_process_loads_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    loaded = tierfall.load(saved, group=True, share=True)
    assert equal(loaded["model"], state()["model"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"group": "gloo"}, "group is a str; expected True"),
        ({"share": True}, "pass group=True too"),
        ({"group": True, "share": "yes"}, "share is 'yes'"),
        ({"group": True, "share": True, "map_location": "meta"}, "map_location is meta"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    tmp_path: Path, words: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        tierfall.load(tmp_path, **words)
