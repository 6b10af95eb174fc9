"""What is restored, from where: which step and which tier are read, what happens to damaged and unreadable copies,
modules and optimizers bit for bit, empty places, autograd, and states that are half filled."""

from __future__ import annotations

import copy
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    IMAGE,
    MANIFEST,
    Log,
    Place,
    blank,
    equal,
    flip,
    folder_of,
    new_place,
    state_of,
    step_in,
    train_a_step,
    training_state,
    wait_until,
)
from tierfall.errors import ConfigError, RestoreError, StepError


def restored(ckpt: tierfall.Checkpointer, **how: Any) -> tuple[tierfall.RestoreReport, int]:
    """Restore into a blank state; return the report and the step that the state holds."""
    state = blank()
    report = ckpt.restore(state, **how)
    assert report is not None
    return report, step_in(state)


# Which step, from which tier -------------------------------------------------------------------------


def test_none_means_that_every_tier_answered_and_none_has_a_checkpoint(place: Place) -> None:
    place.config()
    state = blank()
    with place.open() as ckpt:
        assert ckpt.restore(state) is None
        assert ckpt.load() is None
        ckpt.save(1, state_of(1), block=True)
        assert restored(ckpt)[1] == 1, "what was saved a moment ago is seen"
        ckpt.save(2, state_of(2))
        assert restored(ckpt)[1] == 2


def test_the_newest_is_restored_by_its_number_from_the_fastest_tier(place: Place) -> None:
    place.config(disk={}, pfs={}, host={"on_close": "keep"})
    for step in (9, 10, 99_999_999, 100_000_000):
        with place.open() as ckpt:
            if step > 9:
                restored(ckpt)
            ckpt.save(step, state_of(step), block=True)
    with place.open() as ckpt:
        report, step = restored(ckpt)
        assert (report.step, report.attempt, step) == (100_000_000, 4, 100_000_000)
        assert {source.tier for source in report.sources} == {"host"}
        assert sum(source.bytes for source in report.sources) == report.bytes >= 80_000
        assert report.seconds > 0
        assert report.fallbacks == ()
        for tier in ("disk", "pfs"):
            report, step = restored(ckpt, tier=tier)
            assert {source.tier for source in report.sources} == {tier}
            assert step == 100_000_000
        assert restored(ckpt, step=10)[1] == 10
    shutil.rmtree(place.memory)
    place.memory.mkdir()
    with place.open() as ckpt:
        report, _ = restored(ckpt)
        assert [source.tier for source in report.sources] == ["disk"]


@pytest.mark.parametrize("asked", [{"attempt": 99}, {"tier": "pfs"}, {"step": 9}], ids=str)
def test_a_request_that_fits_nothing_names_what_there_is_and_begins_no_lineage(
    place: Place, asked: dict[str, Any]
) -> None:
    place.config(disk={}, pfs={"flush": {"every": 5}})
    place.save(1)
    word: Any = "1"
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match="1@1 on disk"):
            ckpt.restore(blank(), **asked)
        with pytest.raises(StepError, match="must be an integer"):
            ckpt.restore(blank(), step=word)
        with pytest.raises(StepError, match="restore"):
            ckpt.save(2, state_of(2))
        with pytest.raises(ConfigError, match=r"nowhere.*disk, pfs"):
            ckpt.restore(blank(), tier="nowhere")
    assert [folder.name for folder in place.folders()] == ["step-00000001-a0001"]


def test_after_going_back_the_later_steps_are_abandoned(place: Place) -> None:
    """Listed, and restored by step and attempt only; a pinned one stays, and stays abandoned."""
    place.config(disk={})
    place.save(1, 2, 3)
    with place.open() as ckpt:
        ckpt.pin(3)
        assert restored(ckpt, step=1)[1] == 1
        assert not any(info.abandoned for info in ckpt.checkpoints()), "before the first save"
        ckpt.save(2, state_of(22), block=True)
        wait_until(lambda: len(ckpt.checkpoints()) == 3, "2@1 is deleted, though no rule says so")
        found = {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}
        assert found == {"1@1": False, "3@1": True, "2@2": False}
    with place.open() as ckpt:
        assert restored(ckpt)[1] == 22
        with pytest.raises(RestoreError, match="3@1"):
            ckpt.restore(blank(), step=3)
        assert restored(ckpt, step=3, attempt=1)[1] == 3
        ckpt.save(4, state_of(4), block=True)
        found = {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}
        assert (found["4@3"], found["3@1"]) == (False, True)
    with place.open() as ckpt:
        assert restored(ckpt)[1] == 4
        assert restored(ckpt, step=1)[1] == 1, "the last restore of a process counts"
        ckpt.save(2, state_of(23), block=True)
        ckpt.drain()
        found = {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}
        assert found.pop("4@3", True), "abandoned, or deleted for that"
        assert found["2@4"] is False
    with place.open() as ckpt:
        assert restored(ckpt)[1] == 23


def test_fresh_begins_a_new_lineage(place: Place) -> None:
    place.config()
    place.save(5)
    with place.open(fresh=True) as ckpt:
        ckpt.begin()
        ckpt.pin(5)
        assert ckpt.save(1, state_of(1), block=True).attempt == 2
        assert {c.step: c.abandoned for c in ckpt.checkpoints()} == {1: False, 5: True}
    with place.open() as ckpt:
        assert restored(ckpt)[1] == 1
        assert restored(ckpt, step=5, attempt=1)[1] == 5


def test_a_restore_of_a_part_begins_no_lineage_and_leaves_the_rest(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, training_state(3), block=True)
    with place.open() as ckpt:
        state = training_state(4)
        moments = copy.deepcopy(state["optimizer"].state_dict()["state"])
        ckpt.restore(state, only=["model"])
        assert equal(
            dict(state["model"].state_dict()), dict(training_state(3)["model"].state_dict())
        )
        assert equal(state["optimizer"].state_dict()["state"], moments)
        assert state["extra"] == {"epoch": 4}
        with pytest.raises(StepError, match="restore"):
            ckpt.save(2, state)


# Damaged, and unreadable -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of steps 1 and 2 on two tiers, for copies; chunks are 4 KiB."""
    with new_place(tmp_path_factory.mktemp("two")) as place:
        place.config(disk={}, pfs={}, chunk="4KiB")
        place.save(1, 2)
        return place.root


@pytest.fixture
def pair(two_steps: Path, place: Place) -> Place:
    """A copy of it on ``disk`` alone; ``with_pfs`` adds the second tier."""
    shutil.copytree(two_steps / "disk", place.root / "disk")
    place.config(disk={}, chunk="4KiB")
    return place


def with_pfs(pair: Place, two_steps: Path) -> None:
    shutil.copytree(two_steps / "pfs", pair.root / "pfs")
    pair.config(disk={}, pfs={}, chunk="4KiB")


def test_a_damaged_chunk_is_read_from_the_next_tier(pair: Place, two_steps: Path) -> None:
    """Also if that one is damaged, too, in another chunk."""
    with_pfs(pair, two_steps)
    flip(folder_of(pair, 2) / IMAGE)
    flip(folder_of(pair, 2, "pfs") / IMAGE, -70_000)
    with pair.open() as ckpt:
        report, step = restored(ckpt)
        assert (report.step, step) == (2, 2)
        by_tier = {source.tier: source.bytes for source in report.sources}
        assert by_tier["disk"] > by_tier["pfs"] > 0, "only what is damaged comes from elsewhere"
        (fallback,) = report.fallbacks
        assert "on disk" in fallback.what
        assert "disk" not in fallback.reason, "the tier is named once"
        assert (fallback.id.step, fallback.id.attempt) == (2, 1)  # type: ignore[union-attr]


def test_a_damaged_chunk_that_the_page_cache_has_is_read_from_the_next_tier(place: Place) -> None:
    """What is long, and in memory already, may be read in another way than from the medium."""
    place.config(host={"capacity": "8MiB"}, disk={}, pfs={}, chunk="1MiB")
    with place.open() as ckpt:
        ckpt.save(2, state_of(2, elements=600_000), block=True)
    shard = folder_of(place, 2) / IMAGE
    flip(shard, -1_000_000)
    shard.read_bytes()
    state = blank(elements=600_000)
    with place.open() as ckpt:
        report = ckpt.restore(state)
    assert report is not None
    assert step_in(state) == 2
    assert {source.tier for source in report.sources} == {"disk", "pfs"}


def test_a_restore_from_one_tier_reads_no_other(pair: Place, two_steps: Path) -> None:
    with_pfs(pair, two_steps)
    flip(folder_of(pair, 2) / IMAGE)
    with pair.open() as ckpt:
        with pytest.raises(RestoreError, match=r"disk.*2@1|2@1.*disk"):
            ckpt.restore(blank(), step=2, tier="disk")
        report, step = restored(ckpt, step=2, tier="pfs")
        assert {source.tier for source in report.sources} == {"pfs"}
        assert step == 2


def _cut(folder: Path) -> None:
    with (folder / IMAGE).open("r+b") as file:
        file.truncate(70_000)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the values": lambda folder: flip(folder / IMAGE),
    "a bit of the header": lambda folder: flip(folder / IMAGE, 20),
    "the image is gone": lambda folder: (folder / IMAGE).unlink(),
    "the image is short": _cut,
    "the manifest is gone": lambda folder: (folder / MANIFEST).unlink(),
    "a bit of the manifest": lambda folder: flip(folder / MANIFEST, 100),
    "a bit of the commit record": lambda folder: flip(folder / "commit.json", 60),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_step_that_is_damaged_everywhere_gives_way_to_an_older_one(
    pair: Place, damage: str
) -> None:
    DAMAGE[damage](folder_of(pair, 2))
    with pair.open() as ckpt:
        report, step = restored(ckpt)
        assert (report.step, step) == (1, 1)
        assert {(f.id.step, f.id.attempt) for f in report.fallbacks if f.id} == {(2, 1)}
        assert all(fallback.reason for fallback in report.fallbacks)
        with pytest.raises(RestoreError, match="2@1"):
            ckpt.restore(blank(), step=2)
        ckpt.restore(blank())
        (info,) = [info for info in ckpt.checkpoints() if info.step == 2]
        assert info.copies["disk"].damage
    shutil.rmtree(folder_of(pair, 1))
    with pair.open() as ckpt, pytest.raises(RestoreError, match="2@1"):
        ckpt.restore(blank())


def test_a_tier_that_cannot_be_listed_is_not_an_empty_one(place: Place, store: Faulty) -> None:
    disk = {"flush": {"every": 2}}
    place.config(disk=disk, store=store.tier(), max_wait="0.5s")
    place.save(1, 2, 3)
    store.set("away", "run")
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match=r"store.*unreachable='ignore'"):
            ckpt.restore(blank())
        report, step = restored(ckpt, unreachable="ignore")
        assert (report.step, step) == (2, 2)
        assert any("store" in f.what for f in report.fallbacks)
    shutil.rmtree(place.root / "disk" / "run")
    with place.open() as ckpt:
        for how in ("raise", "ignore"):
            with pytest.raises(RestoreError, match="store"):
                ckpt.restore(blank(), unreachable=how)


def test_a_restore_that_names_a_deleted_step_is_told_so(place: Place) -> None:
    place.config()
    place.save(1, 2)
    with place.open() as ckpt:
        restored(ckpt)
        ckpt.delete(1)
        with pytest.raises(RestoreError, match="step 1") as raised:
            ckpt.restore(blank(), step=1)
        assert "2@1" in str(raised.value)


# A training that continues ---------------------------------------------------------------------------


def trained(
    place: Place, steps: int, losses: list[float], *, model: Any = None, **words: Any
) -> int:
    """The loop of the README; returns where it began."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with place.open(**words) as ckpt:
        report = ckpt.restore(state)
        start = report.step + 1 if report else 0
        for step in range(start, steps):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            ckpt.maybe_save(step, state)
    return start


def test_a_run_that_was_interrupted_computes_what_it_would_have_without(place: Place) -> None:
    place.config(interval={"every": 4, "at_end": False})
    whole: list[float] = []
    trained(place, 12, whole, run="whole")
    parts: list[float] = []
    assert trained(place, 10, parts) == 0
    del parts[9:]
    assert trained(place, 12, parts) == 9
    assert parts == whole


def test_going_back_within_a_process_computes_the_same_again(place: Place) -> None:
    place.config()
    state = training_state()
    model, optimizer = state["model"], state["optimizer"]

    def losses(number: int) -> list[float]:
        found = []
        for _ in range(number):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with place.open() as ckpt:
        ckpt.save(1, state)
        expected = losses(3)
        model(torch.randn(4, 32)).sum().backward()
        ckpt.restore(state)
        assert all(p.grad is None for p in model.parameters())
        assert losses(3) == expected


# Modules and optimizers ------------------------------------------------------------------------------


def _groups(model: nn.Sequential, **more: Any) -> list[dict[str, Any]]:
    return [
        {"params": [], "lr": 1e-5},
        {"params": [*model[0].parameters()], "lr": 0.05},
        {"params": [*model[1].parameters()], **more},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Sequential], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "groups": lambda m: torch.optim.AdamW(_groups(m, betas=(0.8, 0.9)), lr=0.1),
    "lr is a tensor": lambda m: torch.optim.AdamW(_groups(m), lr=torch.tensor(0.1)),
}


def two_layers(seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(model[0].weight.to(memory_format=torch.channels_last))
    return model


def one_step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    out = model[1](torch.ones(2, 4)).sum() + model[0](torch.ones(1, 3, 5, 5)).pow(2).sum()
    out.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_continues_bit_for_bit_in_a_fresh_program(place: Place, kind: str) -> None:
    """State that a fresh optimizer lacks is created, with the strides that it had."""
    place.config()
    model, live = two_layers(0), two_layers(1)
    optimizer, fresh = OPTIMIZERS[kind](model), OPTIMIZERS[kind](live)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scheduled = torch.optim.lr_scheduler.ExponentialLR(fresh, 0.9)
    for _ in range(2):
        one_step(model, optimizer)
        schedule.step()
    with place.open() as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer, "schedule": schedule}, block=True)
        ckpt.restore({"model": live, "optimizer": fresh, "schedule": scheduled})
    assert equal(fresh.state_dict(), optimizer.state_dict())
    assert equal(tierfall.load(place.yaml)["optimizer"], optimizer.state_dict())
    for _ in range(2):
        one_step(model, optimizer)
        one_step(live, fresh)
        schedule.step()
        scheduled.step()
    assert equal(dict(live.state_dict()), dict(model.state_dict()))


class Nested(torch.optim.Optimizer):
    """State in containers, and state for a name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["block"] = {"f": {0: torch.ones(2)}, "list": [torch.ones(1), 3]}
            parameter -= 0.1 * parameter.grad
        self.state["whole"] = {"calls": 3, "sum": torch.ones(2)}  # type: ignore[index]


def test_state_in_odd_forms_comes_back(place: Place) -> None:
    place.config()
    model, live = two_layers(0), two_layers(1)
    adam, other = OPTIMIZERS["AdamW"](model), OPTIMIZERS["AdamW"](live)
    nested, fresh = Nested(model.parameters()), Nested(live.parameters())
    model[1].requires_grad_(False)
    one_step(model, adam)
    model[1].requires_grad_(True)
    for moments in adam.state.values():
        moments["exp_avg"] = moments["exp_avg"].bfloat16()
        moments["step"] = 7
    model[1].weight.grad = torch.ones_like(model[1].weight)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    nested.step()
    with place.open() as ckpt:
        ckpt.save(1, {"model": model, "adam": adam, "nested": nested}, block=True)
        ckpt.restore({"model": live, "adam": other, "nested": fresh})
    left, right = adam.state[model[0].weight], other.state[live[0].weight]
    assert equal(right["exp_avg"], left["exp_avg"])
    assert torch.is_tensor(right["step"]), "as torch's load_state_dict makes of an older version's"
    assert live[1].weight not in other.state
    assert equal(fresh.state[live[0].bias], nested.state[model[0].bias])
    assert equal(fresh.state["whole"], nested.state["whole"])  # type: ignore[index]


class Fused(nn.Module):
    """q, k and v in one parameter; its ``state_dict`` has them apart, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 4))
        self.scale = 2.0
        self.norm = nn.BatchNorm1d(4)
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: Any, state: Any, prefix: str, meta: Any) -> None:
        q, k, v = state.pop(prefix + "qkv").chunk(3)
        scale = torch.tensor(module.scale)
        state.update({prefix + "q": q, prefix + "k": k, prefix + "v": v, prefix + "scale": scale})

    @staticmethod
    def _join(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "q" in state:
            state[prefix + "qkv"] = torch.cat([state.pop(prefix + name) for name in "qkv"])
            module.scale = state.pop(prefix + "scale").item()


def test_a_module_whose_hooks_make_keys_of_its_own_is_restored_by_its_load_state_dict(
    place: Place,
) -> None:
    place.config()
    saved: Any = nn.Sequential(Fused())
    live: Any = nn.Sequential(Fused())
    saved[0].scale = 5.0
    with place.open() as ckpt:
        ckpt.save(1, {"model": saved}, block=True)
        ckpt.restore({"model": live})
    assert equal(live[0].qkv.detach(), saved[0].qkv.detach())
    assert live[0].scale == 5.0
    assert sorted(tierfall.load(place.yaml)["model"])[:2] == ["0.k", "0.norm.bias"]


def test_names_omit_the_wrappers_of_ddp_data_parallel_and_compile(place: Place) -> None:
    place.config()
    plain = two_layers(0)
    wrapped = nn.Sequential(*[checkpoint_wrapper(layer) for layer in two_layers(1)])
    with place.open() as ckpt:
        ckpt.save(1, {"model": plain}, block=True)
        compiled: Any = torch.compile(two_layers(2), backend="eager")
        for other in (compiled, nn.DataParallel(two_layers(3)), wrapped):
            ckpt.restore({"model": other})
            found = [p.detach() for p in other.parameters()]
            assert equal(found, [p.detach() for p in plain.parameters()])


# In place --------------------------------------------------------------------------------------------


def test_tensors_are_filled_in_place_and_objects_stay_the_same(place: Place) -> None:
    place.config()
    state, live = training_state(0), training_state(1)
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        moments = [t for each in live["optimizer"].state.values() for t in each.values()]
        every = [*live["model"].parameters(), *moments]
        before = [(id(t), t.data_ptr(), t._version) for t in every]
        ckpt.restore(live)
    for tensor, (same, address, version) in zip(every, before, strict=True):
        assert (id(tensor), tensor.data_ptr()) == (same, address)
        assert tensor._version > version
    assert equal(live["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert live["extra"] == {"epoch": 0}


def test_a_backward_pass_of_before_a_restore_raises(place: Place) -> None:
    place.config()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    factor = torch.ones(4, 8).t().requires_grad_()
    state = {"model": model, "factor": factor}

    def forward() -> Any:
        return (model(torch.ones(4, 8)) * factor.t()).pow(2).mean()

    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        for only in (["model.1"], ["factor"], None):
            loss = forward()
            ckpt.restore(state, only=only)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        loss = forward()
        ckpt.restore(state, only=["rng"])
        loss.backward()


class Late:
    """An object with a state, that notes whether the tensors of the state were filled before its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.saw = tensor, -1.0

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.saw = self.tensor[0].item()


def test_objects_get_their_load_state_dict_last(place: Place) -> None:
    place.config()
    ones, zeros = torch.ones(3), torch.zeros(3)
    live = Late(zeros)
    with place.open() as ckpt:
        ckpt.save(1, {"late": Late(ones), "z": ones}, block=True)
        ckpt.restore({"late": live, "z": zeros})
    assert live.saw == 1.0


# Memory of several names -----------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(2, 2)


def actor_and_critic(seed: int) -> dict[str, Any]:
    """Two models that share an encoder, and an optimizer of one, after a step."""
    torch.manual_seed(seed)
    encoder = nn.Linear(2, 2)
    state: dict[str, Any] = {"actor": Head(encoder), "critic": Head(encoder)}
    critic = state["critic"]
    state["optimizer"] = torch.optim.AdamW(critic.parameters(), lr=0.1)
    critic.out(critic.encoder(torch.randn(1, 2))).sum().backward()
    state["optimizer"].step()
    return state


def critic_of(state: dict[str, Any]) -> list[torch.Tensor]:
    parameters = [*state["critic"].parameters()]
    moments = [state["optimizer"].state[p]["exp_avg"] for p in parameters]
    return [t.detach() for t in (*parameters, *moments)]


def test_a_shared_module_is_restored_whatever_the_order_of_entries(place: Place) -> None:
    place.config()
    saved = actor_and_critic(0)
    with place.open() as ckpt:
        ckpt.save(1, saved, block=True)
        for names in (["optimizer", "critic", "actor"], ["critic", "optimizer"]):
            live = actor_and_critic(1)
            ckpt.restore({name: live[name] for name in names}, only=names)
            assert equal(critic_of(live), critic_of(saved))


def test_tied_weights_need_one_of_their_names(place: Place) -> None:
    place.config()

    def language(head: str) -> Any:
        model: Any = nn.Module()
        model.embed = nn.Embedding(6, 4)
        if head:
            model.head = nn.Linear(4, 6, bias=False)
        if head == "tied":
            model.head.weight = model.embed.weight
        return model

    for number, (first, second) in enumerate([("", "tied"), ("tied", ""), ("tied", "untied")]):
        saved, live = language(first), language(second)
        with place.open(run=f"run{number}") as ckpt:
            ckpt.save(1, {"model": saved}, block=True)
            ckpt.restore({"model": live})
            assert equal(live.embed.weight.detach(), saved.embed.weight.detach())
            if number == 0:
                with pytest.raises(RestoreError, match="head"):
                    ckpt.restore({"model": language("untied")})


def test_targets_that_share_memory_are_refused_unless_their_values_agree(place: Place) -> None:
    place.config()
    split: dict[str, Callable[[torch.Tensor], Any]] = {
        "wholly": lambda flat: {"a": flat[:4], "b": flat[:4]},
        "in part": lambda flat: {"a": flat[:4], "b": flat[2:6]},
        "with strides": lambda flat: {"a": flat[:4], "b": flat[::2]},
        "an array": lambda flat: {"a": flat[:4], "b": flat.numpy()[2:6]},
    }
    for how, share in split.items():
        values = copy.deepcopy(share(torch.arange(8.0)))
        with place.open(run=how.replace(" ", "-")) as ckpt:
            ckpt.save(1, {"first": torch.ones(99), **values}, block=True)
            values["b"] = values["b"] + 1
            ckpt.save(2, {"first": torch.ones(99), **values}, block=True)
            first, memory = torch.zeros(99), torch.zeros(8)
            state = {"first": first, **share(memory)}
            with pytest.raises(RestoreError, match=r"[ab] shares memory with [ab]"):
                ckpt.restore(state, step=2)
            assert not first.any()
            assert not memory.any()
            ckpt.restore(state, step=1)
            assert equal(memory[:4], torch.arange(4.0))


def test_one_object_under_two_names_is_refused_unless_its_values_agree(place: Place) -> None:
    place.config()
    twice: dict[str, Callable[[int], Any]] = {
        "dict": lambda n: {"epoch": n},
        "list": lambda n: [n],
        "generator": lambda n: torch.Generator().manual_seed(n),
    }
    for kind, make in twice.items():
        with place.open(run=kind) as ckpt:
            ckpt.save(1, {"a": make(1), "b": make(2)}, block=True)
            one = make(0)
            with pytest.raises(RestoreError, match=r"same object|shares memory"):
                ckpt.restore({"a": one, "b": one})
            ckpt.restore({"a": one, "b": one}, only=["a"])


# Empty places, and plain values that have grown ------------------------------------------------------


def empty() -> dict[str, Any]:
    return {
        **{"best": None, "replay": [], "pair": (), "slots": [None, None], "buffers": {}},
        "ordered": OrderedDict(),
        "extra": {"epoch": 0, "inner": {"seen": []}},
        "held": tierfall.item(None, changes="anytime"),
    }


def filled() -> dict[str, Any]:
    state = empty()
    state["best"] = {"weight": torch.ones(2, 2), "scores": [1, torch.full((3,), 2.0)]}
    state["replay"] += [torch.arange(3.0), {"reward": 1.5, "seen": torch.ones(1)}]
    state["pair"] = (torch.ones(1), "text")
    state["slots"][1] = torch.arange(4)
    state["buffers"] |= {"observations": torch.ones(5, 2), 3: torch.zeros(1)}
    state["ordered"]["z"] = torch.tensor([True])
    state["extra"]["epoch"] = 4
    state["extra"]["inner"]["seen"].append(torch.arange(2))
    state["held"].value = [torch.full((2,), 7.0)]
    return state


def bare(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "held": state["held"].value}


def test_a_place_that_is_empty_in_a_fresh_program_takes_what_was_saved(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, filled(), block=True)
    state = empty()
    kept = {key: state[key] for key in ("replay", "buffers", "ordered", "extra", "held", "slots")}
    with place.open() as ckpt:
        ckpt.restore(state)
        assert equal(bare(state), bare(filled()))
        assert all(state[key] is value for key, value in kept.items()), "containers stay themselves"
        state["replay"][0].zero_()
        ckpt.restore(state)
        assert equal(bare(state), bare(filled()))
        part = empty()
        ckpt.restore(part, only=["best.scores"], skip=["replay"])
        assert equal(part["best"], {"scores": filled()["best"]["scores"]})
        lacking = empty()
        del lacking["best"]
        with pytest.raises(RestoreError, match="best"):
            ckpt.restore(lacking)


def test_a_key_that_only_one_side_of_a_dict_has(place: Place, log: Log) -> None:
    """The checkpoint's is added; the state's is an error that ``skip`` allows; on both sides it is one always."""
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {"extra": {"epoch": 1, "seen": 5}}, block=True)
    with place.open() as ckpt:
        mine: dict[str, Any] = {"extra": {"epoch": 0}}
        ckpt.restore(mine)
        assert mine == {"extra": {"epoch": 1, "seen": 5}}
        mine = {"extra": {"epoch": 0, "seen": 0, "newer": 3}}
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match=r"extra\.newer"):
            ckpt.restore(mine)
        ckpt.restore(mine, skip=["extra.newer"])
        assert mine == {"extra": {"epoch": 1, "seen": 5, "newer": 3}}
        with pytest.raises(RestoreError, match=r"extra\.epohc"):
            ckpt.restore({"extra": {"epohc": 0, "seen": 0}})
        ckpt.save(2, mine, block=True)
        ckpt.restore(mine, step=1)
        assert mine == {"extra": {"epoch": 1, "seen": 5}}, "it is newer than the step"
        assert log.wait(r"extra\.newer")


# Half filled -----------------------------------------------------------------------------------------


class Stubborn:
    def __init__(self) -> None:
        self.refuses = False

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("no")


def test_a_half_filled_state_is_called_so_and_not_saved_until_a_restore_succeeds(
    place: Place,
) -> None:
    place.config()
    stubborn = Stubborn()
    state = {**state_of(1), "stubborn": stubborn}
    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, {**state, "extra": {"step": step}}, block=True)
        stubborn.refuses = True
        with pytest.raises(RestoreError, match="HALF FILLED") as raised:
            ckpt.restore(state, step=1)
        assert "stubborn" in str(raised.value)
        for save in (ckpt.save, ckpt.maybe_save):
            with pytest.raises(StepError, match="half filled"):
                save(3, state)
        stubborn.refuses = False
        ckpt.restore(state)
        ckpt.save(3, state, block=True)
    assert len(place.folders()) == 3


def test_an_older_step_never_leaves_what_a_damaged_newer_one_wrote(place: Place) -> None:
    place.config(chunk="128KiB", host={"capacity": "16MiB"})
    base, later = torch.ones(1 << 17), torch.ones(1 << 17)
    with place.open() as ckpt:
        ckpt.save(1, {"base": base}, block=True)
        ckpt.save(2, {"base": base + 1, "later": later}, block=True)
    flip(folder_of(place, 2) / IMAGE, -3)
    state = {"base": torch.zeros(1 << 17), "later": torch.full((1 << 17,), -1.0)}
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match="later"):
            ckpt.restore(state, strict=False)
        state["later"] = torch.full((1 << 17,), -1.0)
        assert ckpt.restore(state, step=1, strict=False) is not None
        assert (state["base"] == 1).all()
        assert (state["later"] == -1).all()
        ckpt.save(2, state, block=True)


def test_optimizer_state_that_a_damaged_newer_step_added_goes_again(place: Place) -> None:
    place.config(chunk="4KiB")
    state = training_state()
    model = state["model"]
    fresh = torch.optim.AdamW(model.parameters())
    with place.open() as ckpt:
        ckpt.save(1, {"model": model, "optimizer": fresh}, block=True)
        train_a_step(model, fresh)
        ckpt.save(2, {"model": model, "optimizer": fresh}, block=True)
    flip(folder_of(place, 2) / IMAGE, -3)
    live = training_state(1)["model"]
    optimizer = torch.optim.AdamW(live.parameters())
    with place.open() as ckpt:
        report = ckpt.restore({"model": live, "optimizer": optimizer})
        assert report is not None
        assert report.step == 1
        assert len(optimizer.state) == 0
        train_a_step(live, optimizer)
        ckpt.restore({"model": live, "optimizer": optimizer}, step=1)
    assert len(optimizer.state) == 0, "nor stays what was added since"
    assert equal(dict(live.state_dict()), dict(training_state()["model"].state_dict()))
