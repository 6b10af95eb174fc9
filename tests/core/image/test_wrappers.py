"""Tensors of classes with ``__tensor_flatten__``: saved by their inner tensors, filled in place, rebuilt by load."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from image_help import header_of, load, make_image, restore
from torch import nn

from tests import wrapped
from tests.wrapped import Coded, CodedMomentum, is_same, parts_of
from tierfall.core.image.merge import merge_headers
from tierfall.core.load.fill import plan_fill
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors.builtin_codecs import UnknownValue
from tierfall.core.types.errors import CaptureError, IntegrityError, RestoreError
from tierfall.core.types.values import Changes


def coded(seed: int, rows: int = 4, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return Coded.of(torch.randn(rows, 6, generator=generator), **options)


def module_of(seed: int) -> nn.Module:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(coded(seed), requires_grad=False)
    module.register_buffer("table", coded(seed + 100))
    return module


def test_wrapper_is_stored_by_its_inner_tensors_under_names_of_its_own() -> None:
    view = walk_state({"a": coded(1), "rng": None})
    assert set(view.names) == {"a%codes", "a%scale%numbers"}


@pytest.mark.parametrize("place", ["bare", "list", "dict"])
def test_wrapper_in_a_container_is_filled_in_place_and_rebuilt_by_load(place: str) -> None:
    def state(value: Any) -> dict[str, Any]:
        return {"x": {"bare": value, "list": [value], "dict": {"in": value}}[place], "rng": None}

    def of(loaded: dict[str, Any]) -> Any:
        return {"bare": lambda x: x, "list": lambda x: x[0], "dict": lambda x: x["in"]}[place](
            loaded["x"]
        )

    image, _ = make_image(state(coded(1)))
    live = coded(2)
    inner, into = parts_of(live), state(live)
    restore(into, image)
    assert of(into) is live
    assert all(a is b for a, b in zip(inner, parts_of(live), strict=True))
    assert is_same(live, coded(1))
    back = of(load(image))
    assert type(back) is Coded
    assert type(back.scale) is wrapped.Table
    assert is_same(back, coded(1))
    assert (back.shape, back.stride()) == (live.shape, live.stride())


def test_parameters_and_buffers_of_a_module_are_filled_in_place() -> None:
    image, _ = make_image({"m": module_of(1), "rng": None})
    target = module_of(2)
    weight, codes = target.weight, target.weight.codes
    restore({"m": target, "rng": None}, image)
    assert target.weight is weight
    assert target.weight.codes is codes
    assert isinstance(target.weight, nn.Parameter)
    assert is_same(target.weight, coded(1))
    assert is_same(target.table, coded(101))
    loaded = load(image)["m"]
    assert is_same(loaded["weight"], coded(1))
    fresh = module_of(3)
    fresh.load_state_dict(loaded)


def test_module_whose_load_is_its_own_gets_wrappers_too() -> None:
    class Own(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = module_of(seed)

        def _load_from_state_dict(self, *arguments: Any) -> None:
            super()._load_from_state_dict(*arguments)

    image, _ = make_image({"m": Own(1), "rng": None})
    target = Own(2)
    restore({"m": target, "rng": None}, image)
    assert is_same(target.inner.weight, coded(1))


def trained(seed: int, steps: int) -> tuple[nn.Module, CodedMomentum]:
    torch.manual_seed(seed)
    module = nn.Linear(8, 4, bias=False)
    optimizer = CodedMomentum(module.parameters())
    train(module, optimizer, steps)
    return module, optimizer


def train(module: nn.Module, optimizer: CodedMomentum, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(16, 8)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_with_wrapped_optimizer_state_continues_bit_for_bit(steps_before: int) -> None:
    module, optimizer = trained(0, 3)
    image, _ = make_image({"m": module, "o": optimizer})
    train(module, optimizer, 3)
    other, its = trained(1, steps_before)
    restore({"m": other, "o": its}, image)
    train(other, its, 3)
    assert torch.equal(module.weight, other.weight)
    assert is_same(optimizer.state[module.weight]["momentum"], its.state[other.weight]["momentum"])


def test_existing_optimizer_state_keeps_its_wrapper() -> None:
    module, optimizer = trained(0, 3)
    image, _ = make_image({"m": module, "o": optimizer, "rng": None})
    other, its = trained(1, 2)
    before = its.state[other.weight]["momentum"]
    codes = before.codes
    restore({"m": other, "o": its, "rng": None}, image)
    after = its.state[other.weight]["momentum"]
    assert after is before
    assert after.codes is codes
    assert is_same(after, optimizer.state[module.weight]["momentum"])


def test_inner_tensors_change_with_the_step_of_their_parameter_only() -> None:
    module, optimizer = trained(0, 1)
    weight = nn.Parameter(coded(1), requires_grad=False)
    view = walk_state({"m": module, "o": optimizer, "p": weight, "loose": coded(2), "rng": None})
    rules = {t.name: (t.changes, owner) for t, owner in zip(view.tensors, view.owners, strict=True)}
    momentum = "o.state.m.weight.momentum"
    assert rules[f"{momentum}%codes"] == (Changes.ON_STEP, id(module.weight))
    assert rules[f"{momentum}%scale%numbers"] == (Changes.ON_STEP, id(module.weight))
    assert rules["p%codes"] == (Changes.ON_STEP, id(weight))
    assert rules["loose%codes"][0] is Changes.ANYTIME
    assert id(weight) in view.parameters
    of_module = module_of(1)
    view = walk_state({"m": of_module, "rng": None})
    owners = dict(zip(view.names, view.owners, strict=True))
    assert owners["m.weight%codes"] == id(of_module.weight)
    assert owners["m.table%codes"] != id(of_module.weight)


@pytest.mark.parametrize(
    ("live", "message"),
    [
        (lambda: coded(2, rows=5), r"size \(4, 6\).*size \(5, 6\)"),
        (lambda: coded(2, context={"dtype": torch.float16, "block": (1, 6)}), "context"),
        (lambda: torch.zeros(4, 6), r"a tensor of tests.wrapped.Coded, .* torch.Tensor"),
        (lambda: wrapped.Table({"numbers": torch.zeros(4, 6)}, None, (4, 6), (6, 1)), "Table"),
    ],
)
def test_other_wrapper_is_an_error_before_anything_is_written(live: Any, message: str) -> None:
    image, _ = make_image({"a": torch.ones(3), "w": coded(1), "rng": None})
    target = {"a": torch.zeros(3), "w": live(), "rng": None}
    with pytest.raises(RestoreError, match=message):
        restore(target, image)
    assert not target["a"].any()


def test_inner_tensor_of_another_dtype_is_an_error() -> None:
    image, _ = make_image({"w": coded(1), "rng": None})
    live = coded(2)
    live.codes = live.codes.to(torch.int16)
    with pytest.raises(RestoreError, match=r"w%codes: the checkpoint has int8 .* int16"):
        restore({"w": live, "rng": None}, image)


def test_plain_tensor_does_not_go_into_a_wrapper() -> None:
    image, _ = make_image({"w": torch.zeros(4, 6), "rng": None})
    with pytest.raises(RestoreError, match=r"a plain tensor, the state has one of .*Coded"):
        restore({"w": coded(1), "rng": None}, image)


def test_skipped_wrapper_stays() -> None:
    image, _ = make_image({"w": coded(1), "a": torch.ones(3), "rng": None})
    state = {"w": coded(2), "a": torch.zeros(3), "rng": None}
    restore(state, image, skip=["w"])
    assert is_same(state["w"], coded(2))
    assert state["a"].all()


def test_tied_wrappers_stay_tied() -> None:
    shared = coded(1)
    image, layout = make_image({"a": shared, "b": shared.detach(), "rng": None})
    assert len(layout.placements) == 2
    loaded = load(image)
    assert loaded["a"].codes.data_ptr() == loaded["b"].codes.data_ptr()


def test_tied_parameters_of_a_module_stay_tied() -> None:
    def tied(seed: int) -> nn.ModuleDict:
        both = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
        both["a"].weight = both["b"].weight = nn.Parameter(coded(seed), requires_grad=False)
        return both

    image, layout = make_image({"m": tied(1), "rng": None})
    assert sum(placement.name.endswith("%codes") for placement in layout.placements) == 1
    target = tied(2)
    restore({"m": target, "rng": None}, image)
    assert target["a"].weight is target["b"].weight
    assert is_same(target["b"].weight, coded(1))


def test_state_dict_of_a_module_is_filled_where_it_shares_the_memory_of_the_module() -> None:
    image, _ = make_image({"m": module_of(1).state_dict(), "rng": None})
    target = module_of(2)
    restore({"m": target.state_dict(), "rng": None}, image)
    assert is_same(target.weight, coded(1))


@pytest.mark.parametrize("context", [object(), {"in": torch.zeros(1)}, lambda: None])
def test_context_without_a_codec_is_refused_with_its_place(context: Any) -> None:
    with pytest.raises(CaptureError, match=r'state\["x"\]\["w"\].*context of tests.wrapped.Coded'):
        walk_state({"x": {"w": coded(1, context=context)}})


def test_class_inside_a_function_is_refused() -> None:
    class Inside(Coded):
        pass

    with pytest.raises(CaptureError, match="top of a module"):
        walk_state({"w": Inside.of(torch.ones(2, 2))})


def test_load_names_the_module_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    image, _ = make_image({"w": coded(1), "rng": None})
    monkeypatch.delattr(wrapped, "Coded")
    found = load(image)["w"]
    assert (type(found), found.name) == (UnknownValue, "tests.wrapped.Coded")
    assert "import tests.wrapped first" in found.reason
    assert [*found.value] == ["codes", "scale"]


def test_ranges_of_a_restore_are_those_of_the_inner_tensors() -> None:
    image, _ = make_image({"w": coded(1), "rng": None})
    plan = plan_fill({"w": coded(2), "rng": None}, header_of(image))
    assert {fill.name for fill in plan.fills} == {"w%codes", "w%scale%numbers"}


def test_damaged_wrapper_is_damage() -> None:
    image, layout = make_image({"w": coded(1), "rng": None})
    good = '[\\"w\\",\\"tests.wrapped:Coded\\",[\\"codes\\",\\"scale\\"],'
    text = image[8 : layout.data_start].decode("ascii")
    assert good in text
    for bad in (
        '[\\"w\\",\\"tests.wrapped:Coded\\",[\\"codes\\",\\"codes\\"],',
        '[\\"w\\",\\"tests.wrapped:Coded\\",[\\"codes\\",0],',
        '[\\"w\\",\\"tests.wrapped:Coded\\",[\\"codes\\"],',
    ):
        broken = text.replace(good, bad).ljust(len(text))[: len(text)].encode("ascii")
        data = image[:8] + broken + image[layout.data_start :]
        with pytest.raises(IntegrityError):
            header_of(data)


def test_image_requires_a_reader_that_knows_wrappers() -> None:
    def required(state: Any) -> list[str]:
        image, layout = make_image(state)
        table = json.loads(image[8 : layout.data_start])
        found: list[str] = json.loads(table["__metadata__"]["tierfall"])["requires"]
        return found

    assert required({"x": {"y": [coded(1)]}, "rng": None}) == ["wrappers"]
    assert required({"x": {"w": torch.ones(2), "v": [torch.ones(2)]}, "rng": None}) == []


# Several ranks ---------------------------------------------------------------------------------------


def merged(*states: Any, own: int | None = None) -> Any:
    headers = {rank: header_of(make_image(state)[0]) for rank, state in enumerate(states)}
    return merge_headers(headers, what="1@1 of several ranks", own=own)


def test_ranks_with_equal_wrappers_have_one() -> None:
    found = merged(*({"w": coded(1), "rng": None} for _ in range(2)))
    plan = plan_fill({"w": coded(2), "rng": None}, found.header)
    names = {found.header.tensors[target.position].name for target in plan.targets}
    assert names == {"w%codes", "w%scale%numbers"}
    assert len(found.replicas) == 2  # the ranks' bytes are compared


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"context": {"dtype": torch.float16, "block": (1, 6)}}, "differs between the ranks"),
        ({"rows": 5}, r"w: is .* on rank 0 and .* on rank 1"),
    ],
)
def test_ranks_with_other_wrappers_are_a_conflict_unless_one_has_precedence(
    others: dict[str, Any], message: str
) -> None:
    states = [{"w": coded(1), "rng": None}, {"w": coded(1, **others), "rng": None}]
    with pytest.raises(RestoreError, match=message):
        plan_fill({"w": coded(2), "rng": None}, merged(*states).header)
    found = merged(*states, own=1)
    assert plan_fill({"w": coded(2, **others), "rng": None}, found.header).targets


def test_ranks_with_wrappers_of_other_classes_are_a_conflict() -> None:
    table = wrapped.Table({"numbers": torch.zeros(4, 6)}, None, (4, 6), (6, 1))
    found = merged({"w": coded(1), "rng": None}, {"w": table, "rng": None})
    with pytest.raises(RestoreError, match=r"w: is of other classes.*tests\.wrapped:Coded"):
        plan_fill({"w": coded(2), "rng": None}, found.header)
