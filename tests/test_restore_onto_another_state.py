"""A restore onto a state that is not as it was at the save: other names, other sizes, optimizers of an older torch,
parameters of several names, targets that share memory, and places that are empty. What does not fit is refused by name,
with the argument that helps, before anything is filled."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.rank_kit import config_of, save_on_ranks
from tierfall import Checkpointer, RestoreReport
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
State = dict[str, Any]


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    return make_config()


def save(config: Any, state: State) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)


def restore(config: Any, state: State, **how: Any) -> str:
    """Restore in a start of its own; return the text of the error, or of none."""
    with tierfall.open(config) as ckpt:
        try:
            ckpt.restore(state, **how)
        except RestoreError as error:
            return str(error)
    return ""


# Names -----------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A model whose own attribute has the name of a wrapper's."""

    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)


def small(width: int = 4, renamed: str = "1", more: int = 0) -> State:
    layers = {"0": nn.Embedding(10, width), renamed: nn.Linear(width, 3)}
    layers |= {f"more{number}": nn.Linear(3, 3) for number in range(more)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("name", ["module", "net"])
def test_a_prefix_that_all_names_have_is_named_with_the_rename_that_helps(
    make_config: MakeConfig, name: str
) -> None:
    config = make_config()
    save(config, small())
    state = {"model": Wrapper(small()["model"], name)}
    text = restore(config, state, only=["model"])
    assert f"all names have the prefix '{name}.' in the state, and not in the checkpoint" in text
    assert ("import removes it" in text) == (name == "module")
    assert f"rename={{'model': 'model.{name}'}}" in text
    assert "1 place:" in text
    assert restore(config, state, only=["model"], rename={"model": f"model.{name}"}) == ""


# The arguments that help -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        ({"more": 1}, ["skip"]),
        ({"width": 6}, ["resize"]),
        ({"width": 6, "more": 1}, ["resize", "skip"]),
    ],
)
def test_the_arguments_that_restore_what_fits_are_ready_to_be_copied(
    config: dict[str, Any], changed: dict[str, Any], arguments: list[str]
) -> None:
    save(config, small())
    text = restore(config, small(**changed))
    call = text.partition("To restore what fits: restore(..., ")[2].removesuffix(")")
    given = eval(f"dict({call})")
    assert list(given) == arguments
    assert restore(config, small(**changed), **given) == ""


@pytest.mark.parametrize(
    "other",
    [
        lambda: {"model": small()["model"].bfloat16(), "more": torch.ones(2)},
        lambda: small(renamed="one"),  # a rename would be a guess
        lambda: {"net": small()["model"]},
        lambda: small(more=9),
    ],
)
def test_no_arguments_are_proposed_that_are_a_guess_or_restore_little(
    config: dict[str, Any], other: Callable[[], State]
) -> None:
    save(config, small())
    text = restore(config, other())
    assert "does not fit the state" in text
    assert "To restore what fits" not in text


def test_plain_entries_beside_a_tensor_that_is_skipped_are_restored(config: dict[str, Any]) -> None:
    save(config, {"c": {"a": {"p": 1, "q": 2}, "d": {"e": {"f": 5}}}})
    live = {"c": {"a": {"p": 0, "q": 3, "t": torch.ones(2)}, "d": {"e": {"f": 0}}}}
    assert restore(config, live, skip=["c.a.t"]) == ""
    tensor = live["c"]["a"].pop("t")
    assert torch.equal(tensor, torch.ones(2))
    assert live == {"c": {"a": {"p": 1, "q": 2}, "d": {"e": {"f": 5}}}}


def test_keys_below_a_counter_are_data(config: dict[str, Any]) -> None:
    save(config, {"c": Counter({"a": {"x": 1, "y": 2}})})
    live = {"c": Counter({"a": {"x": 0, "z": 0}})}
    assert restore(config, live) == ""
    assert live["c"] == Counter({"a": {"x": 1, "y": 2}})


def test_a_restore_that_would_restore_no_tensor_is_refused(config: dict[str, Any]) -> None:
    """``strict=False`` leaves out what one side lacks, and training would go on from random weights."""
    save(config, {"model": small()["model"], "counters": {"next": 3}})
    state = {"net": small()["model"], "counters": {"next": 0}}
    assert "rename={'model': 'net'}?" in restore(config, state)
    text = restore(config, state, strict=False)
    assert "none would be restored; rename={'model': ...}" in text
    assert state["counters"] == {"next": 0}
    assert restore(config, state, strict=False, rename={"model": "net"}) == ""
    assert restore(config, state, strict=False, only=["counters"]) == ""
    assert state["counters"] == {"next": 3}


# Other sizes -----------------------------------------------------------------------------------------


def test_ranks_that_saved_are_merged_first(tmp_path: Path) -> None:
    config, saved = config_of(tmp_path), torch.arange(20.0).view(10, 2)
    save_on_ranks(config, 2, [1], lambda rank, step: {"w": saved})
    live = {"w": torch.full((14, 2), -1.0)}
    assert restore(config, live, resize=["w"]) == ""
    assert torch.equal(live["w"][:10], saved)
    assert torch.equal(live["w"][10:], torch.full((4, 2), -1.0))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, words: int, steps: int) -> State:
    model = nn.Module()
    torch.manual_seed(words)
    model.embed = nn.Parameter(distribute_tensor(torch.randn(words, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model.embed.sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_sharded_parameter_and_its_state(config: dict[str, Any], mesh: DeviceMesh) -> None:
    saved, live = sharded(mesh, 6, 1), sharded(mesh, 9, 0)
    save(config, saved)
    assert restore(config, live, resize=["model.embed"]) == ""
    weight = live["model"].embed
    assert torch.equal(weight.to_local()[:6], saved["model"].embed.to_local())
    average = live["optimizer"].state[weight]["exp_avg"]
    expected = saved["optimizer"].state[saved["model"].embed]["exp_avg"].to_local()
    assert average.placements == weight.placements
    assert torch.equal(average.to_local()[:6], expected)
    assert not average.to_local()[6:].any()


class Factored(torch.optim.Optimizer):
    """Rows and columns without the dimension that they are the mean of, as in transformers' Adafactor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            square = parameter.detach().square() + 1
            state["count"], state["rows"] = torch.tensor(2.0), square.mean(-1)
            state["whole"], state["columns"] = square, square.mean(-2)


def test_a_moment_whose_dimension_may_be_either_is_refused_by_name(config: dict[str, Any]) -> None:
    def words(number: int) -> State:
        model = nn.Sequential(nn.Embedding(number, 4))
        return {"model": model, "optimizer": Factored(model.parameters())}

    saved, live = words(4), words(6)  # of 4 words and 4 columns
    saved["optimizer"].step()
    save(config, saved)
    name = "optimizer.state.model.0.weight.columns"
    text = restore(config, live, resize=["model.0"])
    assert f"skip=[{name!r}]" in text
    assert live["optimizer"].state == {}
    assert restore(config, live, resize=["model.0"], skip=["optimizer.state.model.0"]) == ""


# What load_state_dict does at its end ----------------------------------------------------------------


KINDS = ("Adam", "AdamW", "Adagrad", "NAdam")


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_an_older_torch_saved_as_numbers_are_what_load_state_dict_makes_of_them(
    config: dict[str, Any], kind: str
) -> None:
    model, optimizer = trained(kind, 2)
    for state in optimizer.state.values():
        state["step"] = state["step"].item()
    expected_model, expected = trained(kind, 0)
    expected_model.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    one_step(expected_model, expected)
    save(config, {"model": model, "optimizer": optimizer})
    live, moments = trained(kind, 0)
    assert restore(config, {"model": live, "optimizer": moments}) == ""
    one_step(live, moments)
    assert all(map(torch.equal, live.parameters(), expected_model.parameters()))


# Parameters of several names -------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.out = nn.Linear(2, 2)


def actor_and_critic(seed: int) -> State:
    """Two models with one encoder, and an optimizer of each, after a step."""
    torch.manual_seed(seed)
    encoder = nn.Linear(2, 2)
    state: State = {"actor": Head(encoder), "critic": Head(encoder)}
    for name in ("actor", "critic"):
        head = state[name]
        optimizer = state[f"{name}_optimizer"] = torch.optim.AdamW(head.parameters(), lr=0.1)
        head.out(head.encoder(torch.randn(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state


def critic_of(state: State) -> list[torch.Tensor]:
    """The parameters of the critic, and their moments."""
    parameters = [*state["critic"].parameters()]
    moments = state["critic_optimizer"].state
    return [*parameters, *(moments[p]["exp_avg"] for p in parameters)]


def test_an_encoder_that_came_to_be_shared_gets_the_moments_of_the_name_that_was_saved(
    config: dict[str, Any],
) -> None:
    saved, live = actor_and_critic(0), actor_and_critic(1)
    names = ["critic", "critic_optimizer"]
    save(config, {name: saved[name] for name in names})
    assert restore(config, live, only=names) == ""
    assert all(map(torch.equal, critic_of(live), critic_of(saved)))


def test_an_encoder_that_is_no_longer_shared_is_not_taken_for_two(config: dict[str, Any]) -> None:
    save(config, actor_and_critic(0))
    actor, critic = Head(nn.Linear(2, 2)), Head(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW([*critic.parameters(), *actor.encoder.parameters()])
    live = {"actor": actor, "critic": critic, "critic_optimizer": optimizer}
    text = restore(config, live, only=[*live])
    assert "no parameter group of the state holds the same" in text


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
    # one rank alone: the images are merged
    assert "cannot be compared" in restore(config, {"a": memory[0], "b": memory[0]}, step=1)
    assert restore(config, {"a": memory[0], "b": memory[1]}, step=1) == ""


# Places that are empty -------------------------------------------------------------------------------


def fresh() -> State:
    """What the program makes at its start."""
    return {
        "model": nn.Linear(2, 2),
        "best": None,
        "average": None,
        "replay": [],
        "buffers": {},
        "either": [],
        "extra": {"epoch": 0, "log": [0.5]},
    }


def fill(state: State) -> None:
    """What it has put there by its first save."""
    state["best"] = {"weight": torch.ones(2, 2), "none": None}
    state["average"] = torch.tensor(0.25)
    state["replay"] += [torch.arange(3.0), {"observation": torch.ones(1, 2), "reward": 1.5}]
    state["buffers"] |= {"observations": torch.ones(5, 2), 3: torch.zeros(1), "size": 5}
    state["either"] = {"mask": torch.tensor([True, False])}
    state["extra"] |= {"epoch": 4, "centre": torch.ones(2), "log": [0.5, torch.tensor(0.25)]}


def test_an_object_is_not_made_of_its_state_and_tensors_of_the_state_stay_compared(
    config: dict[str, Any],
) -> None:
    """None in place of a module, and a container that holds tensors already."""
    saved = fresh()
    fill(saved)
    save(config, saved)
    for key, other, name in (
        ("model", None, "model"),
        ("buffers", {"observations": torch.zeros(5, 2)}, "buffers.size"),
        ("replay", [torch.zeros(3)], "replay.1"),
        ("average", 0.0, "average"),
    ):
        state = {**fresh(), key: other}
        assert name in restore(config, state)
        assert state["best"] is None, "nothing is assigned"


def test_going_back_empties_what_was_empty_then_if_the_program_empties_it(
    config: dict[str, Any],
) -> None:
    with tierfall.open(config) as ckpt:
        state = fresh()
        ckpt.save(1, state, block=True)
        fill(state)
        ckpt.save(2, state, block=True)
        with pytest.raises(RestoreError, match="None, or an empty"):
            ckpt.restore(state, step=1)
        empty = {key: value for key, value in fresh().items() if key != "model"}
        ckpt.restore({**state, **empty}, step=1)
    assert empty == {key: value for key, value in fresh().items() if key != "model"}
