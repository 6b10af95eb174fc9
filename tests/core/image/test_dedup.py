"""Which rank writes each replica: every byte once, in parallel, and never what belongs to one rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_help import header_of
from torch import nn

from tierfall.core.image.dedup import (
    NOBODY,
    ReplicaAssignment,
    ReplicaTable,
    ReplicatedTensors,
    assign_writers,
)
from tierfall.core.image.layout import plan_layout
from tierfall.core.image.merge import merge_headers
from tierfall.core.state.item import OnResize, item
from tierfall.core.state.walk import walk_state


def table(entries: dict[int, int], own_bytes: int = 0, chunk_bytes: int = 1 << 20) -> ReplicaTable:
    return ReplicaTable(
        structure="s",
        own_bytes=own_bytes,
        chunk_bytes=chunk_bytes,
        keys=np.array(list(entries), dtype=np.uint64),
        sizes=np.array(list(entries.values()), dtype=np.uint64),
        units=np.ones(len(entries), dtype=np.uint64),
    )


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3, "x": torch.zeros(5)}


def shareable(state: dict[str, Any]) -> ReplicatedTensors:
    view = walk_state(state)
    return ReplicatedTensors(view, plan_layout(view).structure, 1 << 20)


TABLES = st.lists(
    st.builds(
        table,
        st.dictionaries(st.integers(0, 30), st.just(0), max_size=12),
        st.integers(0, 1000),
        st.just(1),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(TABLES, st.integers(1, 1000))
def test_each_byte_of_several_ranks_is_written_by_one_that_has_it(
    tables: list[ReplicaTable], factor: int
) -> None:
    for one in tables:
        one.sizes[:] = (one.keys + 1) * factor
        one.keys[:] *= 4  # the last two bits say what was digested
    division = assign_writers(tables)
    holders = Counter(int(key) for one in tables for key in one.keys)
    assert set(map(int, division.keys)) == {key for key, count in holders.items() if count > 1}
    written = Counter(
        int(key)
        for rank, one in enumerate(tables)
        for key, owner in zip(one.keys, division.owners_of(one.keys), strict=True)
        if owner in (NOBODY, rank)
    )
    assert written == Counter(holders.keys())
    for key, parts in division.parts().items():
        assert all(key in tables[rank].keys for rank, _ in parts)
        ends = [end for _, end in parts]
        assert len({rank for rank, _ in parts}) == len(parts) > 1
        assert ends == sorted({*ends} - {0})
        assert ends[-1] == (key // 4 + 1) * factor
    again = ReplicaAssignment.from_json(division.to_json(), rank=0)
    assert (again.id, list(again.keys), list(again.owners)) == (
        division.id,
        list(division.keys),
        list(division.owners),
    )


def test_what_may_change_at_any_time_or_is_of_one_rank_is_not_shared() -> None:
    state = training()
    names = set(shareable(state).names().values())
    assert "model.0.weight" in names
    assert "optimizer.state.model.0.weight.exp_avg" in names
    assert not any("running_mean" in name or name in ("x", "rng") for name in names)
    wrapped = state | {"optimizer": item(state["optimizer"], on_resize="per_rank")}
    kept = set(shareable(wrapped).names().values())
    assert kept == {name for name in names if not name.startswith("optimizer.")}


def test_what_lies_otherwise_in_memory_is_not_shared() -> None:
    weight = torch.randn(3, 4)
    plain = {"w": nn.Parameter(weight.clone()), "v": nn.Parameter(torch.ones(2))}
    turned = plain | {"w": nn.Parameter(weight.t().contiguous().t())}
    assert not turned["w"].is_contiguous()
    shares = [shareable(plain), shareable(turned)]
    division = assign_writers([share.table for share in shares])
    assert [shares[0].names()[int(key)] for key in division.keys] == ["v"]


def image_of(state: dict[str, Any], left_out: dict[int, int]) -> Any:
    view = walk_state(state)
    layout = plan_layout(view, left_out)
    header = layout.header(view)
    assert header is not None
    return layout, header_of(header + bytes(layout.data_bytes))


def test_an_entry_that_all_take_from_rank_0_is_found_where_another_wrote_it() -> None:
    state = training()
    weight = walk_state(state).names.index("model.2.weight")
    headers = {0: image_of(state, {weight: 1})[1], 1: image_of(state, {})[1]}
    rules = {"model": OnResize.REPLICATE}
    merged = merge_headers(headers, what="test", own=None, rank=7, rules=rules)
    position = [t.name for t in merged.header.tensors].index("model.2.weight")
    assert [block.rank for block in merged.blocks[position]] == [1]
