"""Values come back bit for bit: plain values of all kinds, tensors of all dtypes and strides, arrays, random state,
wrapper subclasses, classes of the program, and values of a codec of one's own."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import tierfall
from tests.contract.kit import Answer, Log, Place, Program, equal, new_place, state_of
from tierfall.errors import CaptureError, ConfigError, RestoreError

BERLIN = ZoneInfo("Europe/Berlin")


class Phase(enum.IntFlag):
    A = 1
    B = 2


class Kind(enum.Enum):
    WARM = "warm"
    MAIN = ("main", 2)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Progress:
    step: int = 0
    average: Any = None
    extra: int = 7

    def __post_init__(self) -> None:
        self.step += 0


VALUES: dict[str, Any] = {
    "plain": [None, True, False, 0, -1, 1 << 63, 10**400, "", "ü \ud800 \x00", b"", b"\x00\xff"],
    "floats": [0.0, -0.0, 5e-324, float("inf"), float("-inf"), float("nan"), 1 - 2j],
    "long": ["x" * 100_000, b"\x00\xff" * 50_000, bytearray(b"ab"), {"deep": ["é" * 70_000]}],
    "keys": {0: 1, "0": 2, None: 3, 2.5: 4, (1, "a"): 5, b"x": 6, Phase.B: 7, True: 8, "a.b": 9},
    "containers": [
        (1, (2, ())),
        {1, "a", None},
        frozenset({2.5}),
        range(1, 9, 2),
        OrderedDict([("z", 1), ("a", 2)]),
        Counter("aab"),
        deque([1, 2], maxlen=3),
        defaultdict(list, a=[1]),
        {},
        [],
        {"%": "tuple", "v": [1]},
        {"__metadata__": {"": 1}, "../up": 2, "a/b": 3, "*": 4},
    ],
    "torch": [torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cuda:1"), torch.int64],
    "numpy": [
        np.float64(1.5),
        np.bool_(True),
        np.str_("hé"),
        np.datetime64("2024-02-29T01"),
        np.timedelta64(3, "h"),
        np.complex64(1j),
        np.arange(3, dtype=">i4"),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(10)[::-2],
        np.array(["ab", "c"]),
        np.array(["2024-01-01", "NaT"], dtype="M8[s]"),
        np.zeros((0, 3)),
        np.array(5, dtype=np.uint16),
        np.array([1.5, np.nan], dtype=np.float16),
    ],
    "times": [
        datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
        datetime(1, 1, 1),
        datetime(2026, 1, 1, tzinfo=UTC),
        date(2024, 2, 29),
        time(1, 2, 3, 4),
        timedelta(days=-1, microseconds=3),
        timezone(timedelta(hours=5, minutes=45)),
    ],
    "classes": [Kind.WARM, Kind.MAIN, Phase.A | Phase.B, Pair(1, [2]), Progress(3, {"a": (1,)})],
    "more": [
        PurePosixPath("/x"),
        Path("a b/ü"),
        Decimal("1.10"),
        UUID(int=7),
        types.SimpleNamespace(a=1),
        argparse.Namespace(lr=0.1, name="x"),
    ],
}
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): lambda dtype=dtype: (  # type: ignore[misc]
            torch.arange(-5, 19).view(4, 6).to(torch.float32).to(dtype)
        )
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
            *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8),
            *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int32),
            *(torch.int64, torch.complex64, torch.complex128),
        )
    },
    "float8_e8m0fnu": lambda: torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "nan_bits": lambda: torch.tensor([0x7FC00001, -0x400001], dtype=torch.int32).view(
        torch.float32
    ),
    "scalar": lambda: torch.tensor(2.5),
    "nothing": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": lambda: torch.arange(20.0)[::3],
    "part": lambda: torch.arange(20.0)[5:9],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: make() for name, make in TENSORS.items()}


@pytest.fixture(scope="module")
def run(module_place: Place, tensors: dict[str, torch.Tensor]) -> Place:
    """A run whose one step has all of the values above."""
    module_place.config(host={"capacity": "32MiB"})
    with module_place.open() as ckpt:
        ckpt.save(1, {"values": VALUES, "tensors": tensors}, block=True)
    return module_place


@pytest.fixture(scope="module")
def found(run: Place) -> dict[str, Any]:
    return dict(tierfall.load(run.yaml))


@pytest.mark.parametrize("kind", VALUES)
def test_a_plain_value_is_loaded_as_what_it_was(found: dict[str, Any], kind: str) -> None:
    assert equal(found["values"][kind], VALUES[kind])


def test_plain_values_are_restored_in_place_of_what_the_state_has(run: Place) -> None:
    mine: dict[str, Any] = {kind: None for kind in VALUES}
    mine["keys"] = {"0": 5}
    with run.open() as ckpt:
        assert ckpt.restore({"values": mine}, only=["values"]) is not None
    for kind in VALUES:
        assert equal(mine[kind], VALUES[kind]), kind
    assert mine["numpy"][6].flags.writeable


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_loaded_and_restored_bit_for_bit(
    run: Place, found: dict[str, Any], tensors: dict[str, torch.Tensor], kind: str
) -> None:
    saved, read = tensors[kind], found["tensors"][kind]
    assert (read.dtype, read.shape) == (saved.dtype, saved.shape)
    assert equal(read.contiguous(), saved.resolve_conj().resolve_neg().contiguous())
    if kind in ("transposed", "channels_last"):
        assert read.stride() == saved.stride(), "dense ones keep their order in memory"
    live = TENSORS[kind]()
    live.untyped_storage().fill_(1)  # type: ignore[attr-defined]
    strides, place_in_memory = live.stride(), live.data_ptr()
    mine = {"tensors": {kind: live}}
    with run.open() as ckpt:
        assert ckpt.restore(mine, only=[f"tensors.{kind}"]) is not None
    assert mine["tensors"][kind] is live
    assert (live.stride(), live.data_ptr()) == (strides, place_in_memory)
    assert equal(live.resolve_conj().resolve_neg().contiguous(), read.contiguous())


def test_what_lies_between_the_elements_of_a_tensor_is_left_alone(run: Place) -> None:
    memory = torch.full((20,), -1.0)
    with run.open() as ckpt:
        ckpt.restore({"tensors": {"gaps": memory[::3]}}, only=["tensors.gaps"])
    assert memory[::3].tolist() == list(range(0, 20, 3))
    assert memory[1::3].tolist() == [-1] * len(memory[1::3])


def test_keys_that_would_be_one_name_stay_apart(place: Place) -> None:
    place.config()
    names: list[Any] = [0, "0", "a.b", "a/b", "../up", "", "w%p1", "w", "*", "%i0", b"0", (0,)]
    state = {
        "t": {name: torch.full((2,), float(n)) for n, name in enumerate(names)},
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    live = {
        "t": {name: torch.zeros(2) for name in names},
        "a.b": torch.full((1,), 5.0),
        "a": {"b": torch.full((1,), 5.0)},
    }
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        ckpt.restore(live)
    for read in (live, tierfall.load(place.yaml)):
        assert equal({k: v for k, v in read.items() if k != "rng"}, state)


def test_long_streams_and_large_tensors_span_chunks(place: Place) -> None:
    place.config(host={"capacity": "32MiB"}, chunk="4KiB")
    stream = io.BytesIO(bytes(range(256)) * 3000)
    stream.seek(5)
    state = {"stream": stream, "t": torch.arange(300_000, dtype=torch.int32), "s": torch.ones(3)}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
    read = tierfall.load(place.yaml)
    assert equal(read["t"], state["t"])
    assert equal(read["s"], state["s"])
    assert read["stream"].getvalue() == stream.getvalue()


# Random state ----------------------------------------------------------------------------------------


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), np.random.random()


def test_random_state_and_generators_continue(place: Place) -> None:
    place.config()
    generator = torch.Generator().manual_seed(5)
    with place.open() as ckpt:
        ckpt.save(1, {"generator": generator}, block=True)
        expected = (*draws(), torch.rand(2, generator=generator).tolist())
        ckpt.restore({"generator": generator})
        assert (*draws(), torch.rand(2, generator=generator).tolist()) == expected
        before = torch.get_rng_state()
        ckpt.restore({"generator": generator}, only=["generator"])
        assert torch.equal(torch.get_rng_state(), before), (
            "with only it is not, unless rng is named"
        )
        ckpt.restore({}, only=["rng"])
        assert draws() == expected[:3]


def test_a_state_with_rng_of_its_own_has_no_other(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {"rng": 7}, block=True)
        before = torch.get_rng_state()
        torch.rand(1)
        after = torch.get_rng_state()
        mine = {"rng": 0}
        ckpt.restore(mine)
    assert mine == {"rng": 7}
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)
    assert dict(tierfall.load(place.yaml)) == {"rng": 7}


# Wrapper subclasses ----------------------------------------------------------------------------------


class Quantized(torch.Tensor):
    """A tensor of two inner ones, as torchao's are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, block: int) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, block: int) -> None:
        self.qdata, self.scale, self.block = data, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], {"block": self.block}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantized:
        return cls(inner["qdata"], inner["scale"], context["block"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (one,) = args
            return cls(one.qdata, one.scale, one.block)
        raise NotImplementedError(func)


def quantized(fill: int, block: int = 32) -> Quantized:
    return Quantized(torch.full((4, 8), fill, dtype=torch.int8), torch.full((4,), fill / 2), block)


def test_a_wrapper_subclass_is_filled_in_place_and_built_anew(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {"w": quantized(3)}, block=True)
        live = quantized(0)
        inner = live.qdata
        ckpt.restore({"w": live})
        assert live.qdata is inner
        assert (inner[0, 0].item(), live.scale[0].item()) == (3, 1.5)
        with pytest.raises(RestoreError, match="w"):
            ckpt.restore({"w": quantized(0, block=64)})
    (read,) = [tierfall.load(place.yaml)["w"]]
    assert type(read) is Quantized
    assert (read.block, read.qdata[0, 0].item(), read.scale[0].item()) == (32, 3, 1.5)


# Codecs and classes ----------------------------------------------------------------------------------


class Price:
    def __init__(self, cents: int, history: torch.Tensor) -> None:
        self.cents, self.history = cents, history


def test_a_registered_codec_saves_a_type_of_ones_own_tensors_included(place: Place) -> None:
    place.config()
    tierfall.register_codec(Fraction, "contract.Fraction", str, Fraction)
    tierfall.register_codec(
        Price,
        "contract.Price",
        lambda price: {"cents": price.cents, "history": price.history},
        lambda plain: Price(plain["cents"], plain["history"]),
    )
    state: dict[str, Any] = {"ratio": Fraction(1, 3), "price": Price(5, torch.arange(3.0))}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        mine: dict[str, Any] = {"ratio": Fraction(0), "price": None}
        ckpt.restore(mine)
    for read in (mine, tierfall.load(place.yaml)):
        assert read["ratio"] == Fraction(1, 3)
        assert (type(read["price"]), read["price"].cents) == (Price, 5)
        assert read["price"].history.tolist() == [0, 1, 2]
    nothing: Any = None
    for kind, name in ((nothing, "x"), (int, "x"), (Price, "contract.Fraction")):
        with pytest.raises(ConfigError):
            tierfall.register_codec(kind, name, str, str)


TRAIN = """
import collections, dataclasses, enum
import torch, tierfall

Pair = collections.namedtuple("Pair", "left right")

@dataclasses.dataclass
class Progress:
    step: int = 0
    average: object = None

class Phase(enum.Enum):
    WARM = 1
    MAIN = 2

class Money:
    def __init__(self, cents):
        self.cents = cents

tierfall.register_codec(Money, "Money", lambda money: money.cents, Money)

def main():
    state = {
        "model": torch.nn.Linear(2, 2), "progress": Progress(), "phase": Phase.WARM, "pair": Pair(0, 0),
        "money": Money(0), "counts": {Phase.WARM: 0},
    }
    with tierfall.open("tiers.yaml") as ckpt:
        report = ckpt.restore(state)
        step = report.step + 1 if report else 1
        print(step, state["progress"].step, state["phase"].name, state["pair"].left, state["money"].cents, flush=True)
        state["progress"] = Progress(step, torch.full((2,), float(step)))
        state["phase"], state["pair"], state["money"] = Phase.MAIN, Pair(step, "right"), Money(step)
        state["counts"][Phase.WARM] = step
        ckpt.save(step, state, block=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder with ``train.py``, started twice: a script whose own classes are in the state."""
    with new_place(tmp_path_factory.mktemp("project")) as place:
        place.config()
        (place.root / "train.py").write_text(TRAIN)
        for step, line in ((1, "1 0 WARM 0 0"), (2, "2 1 MAIN 1 1")):
            answer = started(place)
            assert answer.out.strip() == line, step
            assert "class of this script, Progress" in answer.err, "the first save warns"
        yield place


def started(place: Place) -> Answer:
    program = Program(
        "import runpy; runpy.run_path('train.py', run_name='__main__')", [], place.root, {}
    )
    answer = program.end()
    assert answer.code == 0, answer.err
    return answer


def test_a_class_of_the_script_is_found_by_the_scripts_name(project: Place) -> None:
    """In a program that imports the script, and in the script that continues what the import has saved."""
    code = """
    sys.path.insert(0, "")
    import train
    loaded = tierfall.load("disk", step=2)
    assert type(loaded["progress"]) is train.Progress and loaded["money"].cents == 2
    assert (loaded["phase"], loaded["pair"]) == (train.Phase.MAIN, train.Pair(2, "right"))
    assert loaded["counts"] == {train.Phase.WARM: 2}
    train.main()
    """
    assert project.run(code).out.strip() == "3 2 MAIN 2 2"
    assert started(project).out.strip() == "4 3 MAIN 3 3"


def test_a_value_of_a_class_that_nobody_imported_is_an_unknown_value(
    project: Place, log: Log
) -> None:
    read = tierfall.load(project.root / "disk", step=2)
    assert read["model"]["weight"].shape == (2, 2)
    values = {name: read[name] for name in ("progress", "phase", "pair", "money")}
    assert {type(value) for value in values.values()} == {tierfall.UnknownValue}
    assert [value.name.split(".")[-1] for value in values.values()] == [
        *("Progress", "Phase", "Pair", "Money")
    ]
    assert values["progress"].value["step"] == 2
    assert equal(values["progress"].value["average"], torch.full((2,), 2.0))
    assert (values["phase"].value, values["money"].value) == ("MAIN", 2)
    assert "import train" in values["phase"].reason
    assert "register_codec" in values["money"].reason
    assert log.wait("Progress")
    assert sorted(tierfall.load(project.root / "disk", only=["model.weight"])) == ["model"]


def test_a_restore_refuses_a_value_of_an_unknown_class_by_name_and_can_skip_it(
    project: Place,
) -> None:
    names = ("progress", "phase", "pair", "money", "counts")
    model = nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, **dict.fromkeys(names)}
    before = model.weight.detach().clone()
    with project.open() as ckpt:
        with pytest.raises(RestoreError) as raised:
            ckpt.restore(state, step=2)
        for name in names:
            assert name in str(raised.value)
        assert "import train" in str(raised.value)
        assert equal(model.weight.detach(), before), "nothing is written"
        ckpt.restore(state, step=2, skip=[*names])
    expected = tierfall.load(project.root / "disk", step=2)["model"]["weight"]
    assert equal(model.weight.detach(), expected)


def test_a_field_that_a_dataclass_got_since_has_its_default(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.config()

    @dataclasses.dataclass
    class Old:
        step: int = 0

    Old.__qualname__ = Old.__name__ = "Progress"
    Old.__module__ = __name__
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "Progress", Old)
        with place.open() as ckpt:
            ckpt.save(1, {"progress": Old(4)}, block=True)
    mine: dict[str, Any] = {"progress": None}
    with place.open() as ckpt:
        ckpt.restore(mine)
    assert mine["progress"] == Progress(4)
    assert mine["progress"].extra == 7


def test_an_item_is_its_value(place: Place) -> None:
    place.config()
    wrapped: Any = tierfall.item(torch.ones(3), changes="anytime")
    assert wrapped.value.tolist() == [1, 1, 1]
    plain: Any = tierfall.item({"a": 1}, on_resize="per_rank")
    with place.open() as ckpt:
        ckpt.save(1, {"t": wrapped, "v": plain}, block=True)
        wrapped.value.zero_()
        plain.value["a"] = 2
        ckpt.restore({"t": wrapped, "v": plain})
    assert wrapped.value.tolist() == [1, 1, 1]
    assert plain.value == {"a": 1}
    assert equal(tierfall.load(place.yaml)["t"], torch.ones(3))
    for wrong in ({"changes": "never"}, {"on_resize": "grow"}):
        with pytest.raises((ConfigError, CaptureError), match=r"never|grow"):
            tierfall.item(1, **wrong)  # type: ignore[arg-type]


def test_a_shard_is_a_safetensors_file_and_nothing_in_it_is_pickled(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {**state_of(1), "values": VALUES}, block=True)
    (folder,) = place.folders()
    (image,) = folder.glob("*.safetensors")
    assert equal(safetensors.torch.load_file(image)["w"], state_of(1)["w"])
    assert b"\x80\x04\x95" not in image.read_bytes(), "the beginning of a pickle"
