"""Parameters of several names, and targets that share memory: a restore does not depend on names or their order, and
refuses before it fills what cannot all be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# Targets that share memory ---------------------------------------------------------------------------


def test_several_ranks_compare_what_shares_memory_and_refuse_what_they_cannot_compare(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    state = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    save_on_ranks(config, 2, [1], lambda rank, step: state)
    save_on_ranks(config, 2, [2], lambda rank, step: {**state, "b": state["b"] + 1}, go_on=True)
    with network(["a", "a"]) as ranks:
        opened = [lambda r=r: Checkpointer(config, ranks=r) for r in ranks]  # type: ignore[misc]
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
