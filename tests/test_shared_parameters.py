"""Parameters of several names, and targets that share memory: a restore does not depend on names or their order, and
refuses before it fills what cannot all be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.rank_kit import config_of, save_on_ranks
from tierfall import Checkpointer, RestoreReport
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
Config = dict[str, Any]


class Head(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.out = nn.Linear(2, 2)


def actor_and_critic(seed: int) -> dict[str, Any]:
    """Two models with one encoder, and an optimizer of each, after a step."""
    torch.manual_seed(seed)
    encoder = nn.Linear(2, 2)
    state: dict[str, Any] = {"actor": Head(encoder), "critic": Head(encoder)}
    for name in ("actor", "critic"):
        head = state[name]
        optimizer = state[f"{name}_optimizer"] = torch.optim.AdamW(head.parameters(), lr=0.1)
        head.out(head.encoder(torch.randn(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state


def tensors_of(state: dict[str, Any], name: str) -> list[torch.Tensor]:
    """The parameters of a model, and their moments."""
    parameters = [*state[name].parameters()]
    moments = state[f"{name}_optimizer"].state
    return [*parameters, *(moments[p]["exp_avg"] for p in parameters)]


def save(config: Config, state: dict[str, Any]) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)


def restore(config: Config, state: dict[str, Any], **how: Any) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(state, **how)


def test_an_encoder_that_came_to_be_shared_gets_the_moments_of_the_name_that_was_saved(
    make_config: MakeConfig,
) -> None:
    config, saved, live = make_config(), actor_and_critic(0), actor_and_critic(1)
    save(config, {name: saved[name] for name in ("critic", "critic_optimizer")})
    restore(config, live, only=["critic", "critic_optimizer"])
    assert all(map(torch.equal, tensors_of(live, "critic"), tensors_of(saved, "critic")))


def test_an_encoder_that_is_no_longer_shared_is_not_taken_for_two(make_config: MakeConfig) -> None:
    config = make_config()
    save(config, actor_and_critic(0))
    critic = Head(nn.Linear(2, 2))
    actor = Head(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW([*critic.parameters(), *actor.encoder.parameters()])
    with pytest.raises(RestoreError, match="no parameter group of the state holds the same"):
        restore(
            config,
            {"actor": actor, "critic": critic, "critic_optimizer": optimizer},
            only=["actor", "critic", "critic_optimizer"],
        )


class Language(nn.Module):
    """A head that is tied to the embedding, or is not, or has no name of its own."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        if head:
            self.head = nn.Linear(4, 6, bias=False)
        if head == "tied":
            self.head.weight = self.embed.weight


def test_a_name_whose_memory_or_bytes_another_name_restores_is_no_mismatch(
    make_config: MakeConfig,
) -> None:
    for number, (saved, live) in enumerate(
        [(Language(""), Language("tied")), (Language("tied"), Language(""))]
    ):
        config = make_config(run=f"run{number}")
        save(config, {"model": saved})
        restore(config, {"model": live})
        assert torch.equal(live.embed.weight, saved.embed.weight)
        untied = Language("untied")
        if number == 0:
            with pytest.raises(RestoreError, match=r"head\.weight: in the state, not in"):
                restore(config, {"model": untied})
        else:
            restore(config, {"model": untied})
            assert torch.equal(untied.head.weight, saved.embed.weight)


# Targets that share memory ---------------------------------------------------------------------------


def test_one_stored_tensor_for_two_targets_that_overlap(make_config: MakeConfig) -> None:
    shared, memory = torch.arange(6.0), torch.zeros(12)
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"a": shared, "b": shared}, block=True)
        with pytest.raises(RestoreError, match="shares memory"):
            ckpt.restore({"a": memory[:6], "b": memory[5:11]})
        assert not memory.any()
        beside = {"a": memory[::2], "b": memory[1::2]}
        ckpt.restore(beside)
        assert all(torch.equal(each, shared) for each in beside.values())


def test_several_ranks_compare_what_shares_memory_and_refuse_what_they_cannot_compare(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    state = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    save_on_ranks(config, 2, [1], lambda rank, step: state)
    save_on_ranks(config, 2, [2], lambda rank, step: {**state, "b": state["b"] + 1}, go_on=True)
    with network(["a", "a"]) as ranks:
        opened = [lambda r=r: Checkpointer(config, run="run", ranks=r) for r in ranks]  # type: ignore[misc]
        both: Any = on_all(opened)
        memory = torch.zeros(2, 4)
        states = [{"a": each, "b": each} for each in memory]
        for step, agree in ((2, False), (1, True)):
            pairs = zip(both, states, strict=True)
            done = on_all([lambda c=c, s=s, n=step: c.restore(s, step=n) for c, s in pairs])  # type: ignore[misc]
            if agree:
                assert all(isinstance(each, RestoreReport) for each in done), done
                assert memory.tolist() == [[0, 1, 2, 3]] * 2
            else:
                assert all("shares memory" in str(each) for each in done), done
                assert not memory.any()
        on_all([ckpt.close for ckpt in both])
    with tierfall.open(config) as alone:  # the images are merged
        with pytest.raises(RestoreError, match="cannot be compared"):
            alone.restore({"a": memory[0], "b": memory[0]}, step=1)
        alone.restore({"a": memory[0], "b": memory[1]}, step=1)


class Counter:
    """An object with a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _overlapping() -> tuple[Any, Any]:
    whole = np.zeros(3)
    return whole, whole[1:]


def _array_and_tensor() -> tuple[Any, Any]:
    whole = np.zeros(3)
    return {"deep": [whole]}, torch.from_numpy(whole)


def _twice(made: Any) -> tuple[Any, Any]:
    return made, made


ONE_THING: dict[str, tuple[tuple[Any, Any], Callable[[], tuple[Any, Any]]]] = {
    "views of an array": ((np.ones(3), np.full(2, 8.0)), _overlapping),
    "an array": ((np.ones(3), np.zeros(3)), lambda: _twice(np.full(3, 7.0))),
    "an array and a tensor": (
        ({"deep": [np.ones(3)]}, torch.zeros(3, dtype=torch.float64)),
        _array_and_tensor,
    ),
    "a generator": (
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        lambda: _twice(torch.Generator()),
    ),
    "a dict": (({"epoch": 1}, {"epoch": 2}), lambda: _twice({"epoch": 0})),
    "a list": (([1], [2]), lambda: _twice([0])),
    "an object": ((Counter(1), Counter(2)), lambda: _twice(Counter(0))),
}


@pytest.mark.parametrize("kind", ONE_THING)
def test_what_is_one_thing_in_the_state_and_two_in_the_checkpoint_is_refused(
    make_config: MakeConfig, kind: str
) -> None:
    """The result would depend on the order of the entries. Equal ones are restored."""
    (a, b), make = ONE_THING[kind]
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"a": a, "b": b}, block=True)
        same = dict(zip("ab", make(), strict=True))
        ckpt.save(2, same, block=True)
    live = dict(zip("ab", make(), strict=True))
    before = repr({k: getattr(v, "count", v) for k, v in live.items()})
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(
            RestoreError, match=r"[ab]:? (shares memory with|is the same object as)"
        ):
            ckpt.restore(live, step=1)
        assert repr({k: getattr(v, "count", v) for k, v in live.items()}) == before
        assert ckpt.restore(live, step=2) is not None
        assert ckpt.restore(live, step=1, only=["a"]) is not None


def test_skip_refuses_what_shares_memory_with_something_restored(make_config: MakeConfig) -> None:
    def state(of: Callable[[], tuple[Any, Any]]) -> dict[str, Any]:
        return dict(zip(("a", "b"), of(), strict=True))

    def modules(shared: bool) -> tuple[Any, Any]:
        one = nn.Linear(2, 2)
        return one, one if shared else nn.Linear(2, 2)

    def in_part() -> tuple[Any, Any]:
        whole = torch.zeros(10)
        return whole[:6], whole[4:]

    def columns() -> tuple[Any, Any]:
        whole = torch.zeros(2, 6)
        return whole[:, :3], whole[:, 3:]

    def nested() -> tuple[Any, Any]:
        a, b = in_part()
        return a, {"inner": b}

    def optimizers() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return optimizer, optimizer

    def apart(a: Any, b: Any) -> Callable[[], tuple[Any, Any]]:
        return lambda: (a, b)

    cases: list[tuple[Any, Any, str]] = [
        (apart(torch.ones(6), torch.ones(6)), in_part, "b: shares its memory with a"),
        (apart(torch.ones(6), {"inner": torch.ones(6)}), nested, "b.inner: shares its memory"),
        (apart(*modules(False)), lambda: modules(True), "b.weight: shares its memory with a.w"),
        (optimizers, optimizers, "b: shares its object with a"),
        (apart(torch.ones(2, 3), torch.ones(2, 3)), columns, ""),
    ]
    for number, (saved, live, refused) in enumerate(cases):
        config = {**make_config(), "run": f"skip-{number}"}
        save(config, state(saved))
        into = state(live)
        if refused:
            with pytest.raises(RestoreError, match=re.escape(refused)):
                restore(config, into, skip=["b"])
        else:
            restore(config, into, skip=["b"])
            assert into["a"].all()
            assert not into["b"].any()
