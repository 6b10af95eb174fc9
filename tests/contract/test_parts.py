"""Parts of a checkpoint: ``tierfall.open_tensors``, addresses, the cache of chunks, and ``tierfall diff``."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    IMAGE,
    Log,
    Place,
    equal,
    flip,
    folder_of,
    new_place,
    state_of,
    step_in,
    wait_until,
)
from tierfall.errors import ConfigError, RestoreError

CHUNK = 4096
TWO_CHUNKS = 2 * CHUNK


def tensors_of(seed: int = 1) -> dict[str, Any]:
    """Tensors of many kinds: rows shorter and longer than a chunk."""
    torch.manual_seed(seed)
    return {
        "big": torch.randn(64, 33, 17),
        "rows": torch.randn(300, 70),
        "wide": torch.randn(5, 4000, dtype=torch.float64),
        "bf16": torch.randn(10, 10).bfloat16(),
        "fp8": torch.randn(10, 10).to(torch.float8_e4m3fn),
        "complex": torch.randn(20, 3, dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bits": torch.rand(9) > 0.5,
        "turned": torch.randn(30, 20).t(),
        "list": [torch.arange(3), torch.arange(4)],
    }


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    lists = {f"list.{i}": each for i, each in enumerate(state["list"])}
    return {name: each for name, each in state.items() if name != "list"} | lists


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Step 1 on disk, packed on far, and at an address, for tests that change nothing."""
    with new_place(tmp_path_factory.mktemp("run")) as place:
        store = Faulty(place.root)
        packed = {"compress": {"codec": "planes"}}
        place.config(disk={}, far=packed, store=store.tier(), chunk=CHUNK)
        with place.open() as ckpt:
            ckpt.save(1, {**tensors_of(), "extra": {"epoch": 7}}, block=True)
        yield place


def address(place: Place, below: str = "") -> str:
    return f"faulty://{place.root / 'store'}{below}"


def spent(tensors: tierfall.Tensors) -> int:
    return sum(tensors.sources.values())


# open_tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["yaml", "disk", "far", "far/run", "address", "shard"])
def test_each_tensor_is_that_of_a_load_and_each_chunk_is_read_once(run: Place, way: str) -> None:
    ways = {"yaml": run.yaml, "address": address(run), "shard": folder_of(run, 1) / IMAGE}
    expected = flat(tensors_of())
    with tierfall.open_tensors(ways.get(way, run.root / way)) as tensors:
        assert (tensors.step, tensors.attempt) == (1, 1)
        assert tensors.keys() - expected.keys() == {"rng.torch", "rng.python.state"}
        header = spent(tensors)
        for name, value in tensors.items():
            assert name.startswith("rng") or equal(value, expected[name]), name
        assert spent(tensors) == (folder_of(run, 1) / IMAGE).stat().st_size > header
        [tensors[name] for name in tensors]
    for name in expected:
        with tierfall.open_tensors(run.root / "disk") as tensors:
            tensors[name]
            assert spent(tensors) <= header + expected[name].nbytes + TWO_CHUNKS, name


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_read_whole(place: Place) -> None:
    place.config()
    whole = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8)
    with place.open() as ckpt:
        ckpt.save(1, {"q": whole}, block=True)
    with tierfall.open_tensors(place.yaml) as tensors:
        assert torch.equal(tensors["q"], whole)
        with pytest.raises(ConfigError, match=r"tensors\['q'\]"):
            tensors.slice("q")


def test_a_slice_has_the_elements_that_a_tensor_has_there(run: Place) -> None:
    chosen = random.Random(1)

    def part(length: int) -> Any:
        if chosen.random() < 0.3 and length:
            return chosen.randrange(-length, length)
        ends = sorted(chosen.randrange(-length - 2, length + 3) for _ in range(2))
        low, high = (chosen.choice([end, None]) for end in ends)
        return slice(low, high, chosen.choice([None, 1, 1, 2, 3, 50]))

    with tierfall.open_tensors(run.root / "far") as tensors:
        for name, whole in flat(tensors_of()).items():
            found = tensors.slice(name)
            assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
            for _ in range(40):
                index = tuple(part(n) for n in whole.shape[: chosen.randrange(whole.dim() + 1)])
                if chosen.random() < 0.3:
                    index = (..., part(whole.shape[-1])) if whole.dim() else (...,)
                one, other = found[index], whole[index]
                assert (one.dtype, one.shape) == (other.dtype, other.shape), (name, index)
                wide = torch.complex128
                assert torch.equal(one.to(wide), other.to(wide)), (name, index)


@pytest.mark.parametrize(
    ("name", "index", "touched"),
    [
        ("rows", slice(10, 20), 10 * 280),
        ("wide", (slice(None), slice(0, 10)), 5 * CHUNK),
        ("wide", (slice(None, None, 2), slice(7, 9)), 3 * CHUNK),
        ("wide", slice(4, 5), 32000),
        ("big", (3, slice(None), 5), 33 * 17 * 4),
        ("big", slice(5, 5), 0),
        ("rows", (slice(None), -1), 300 * 280),
    ],
)
def test_a_slice_reads_the_chunks_that_it_touches(
    run: Place, name: str, index: Any, touched: int
) -> None:
    with tierfall.open_tensors(run.root / "disk") as tensors:
        header = spent(tensors)
        tensors.slice(name)[index]
        assert spent(tensors) - header <= touched + TWO_CHUNKS


def test_an_index_or_a_name_that_does_not_fit_says_what_does(run: Place) -> None:
    with tierfall.open_tensors(run.yaml) as tensors:
        big = tensors.slice("big")
        for wrong, error in (
            *(((1, 1, 1, 1), IndexError), (64, IndexError), (slice(None, None, -1), ValueError)),
            *((None, TypeError), (True, TypeError), ([1, 2], TypeError), ("1", TypeError)),
        ):
            with pytest.raises(error):
                big[wrong]
        for read in (tensors.__getitem__, tensors.slice):
            with pytest.raises(KeyError, match="nearest: big"):
                read("bigg")
            with pytest.raises(RestoreError, match=r"plain value: tierfall.load.*'extra'"):
                read("extra.epoch")
        before = spent(tensors)
        assert "big" in tensors
        assert "extra" not in tensors
        assert tensors.get("bigg") is None
        assert len(tensors) == len([*tensors])
        assert spent(tensors) == before
    with pytest.raises(ConfigError, match="closed"):
        big[0]
    with pytest.raises(RestoreError, match=r"open_tensors: .*step 9"):
        tierfall.open_tensors(run.yaml, step=9)


def test_a_damaged_chunk_is_read_from_another_copy_and_else_only_its_tensors_are_lost(
    place: Place, store: Faulty
) -> None:
    place.config(disk={}, store=store.tier(), chunk=CHUNK)
    state = {"a": torch.randn(5000), "b": torch.randn(5000)}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
    first = folder_of(place, 1) / IMAGE
    second = store.folder / "run" / first.parent.name / IMAGE
    with tierfall.open_tensors(place.yaml) as tensors:
        flip(first, (64 << 10) + 8000)
        assert all(equal(tensors[name], state[name]) for name in "ab")
        assert set(tensors.sources) == {"disk", "store"}
    flip(second, (64 << 10) + 8000)
    with tierfall.open_tensors(place.yaml) as tensors:
        with pytest.raises(
            RestoreError, match=r"open_tensors of 1@1: chunk .* is damaged in every"
        ):
            [tensors[name] for name in tensors]
        read = [tensors.slice(name)[-900:].equal(state[name][-900:]) for name in "ab"]
        assert read == [True, True], "from other chunks"


def test_a_checkpoint_that_is_deleted_meanwhile_says_so(place: Place) -> None:
    place.config(chunk=CHUNK)
    state = {"w": torch.randn(5000), "v": torch.randn(5000)}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        ckpt.save(2, state, block=True)
        with tierfall.open_tensors(place.root / "disk", step=1) as tensors:
            assert equal(tensors["w"], state["w"])
            ckpt.delete(1)
            wait_until(lambda: place.folders() == [folder_of(place, 2)], "it is gone")
            with pytest.raises(RestoreError, match=r"1@1 was deleted.*another step"):
                tensors["v"]


def test_threads_share_one(run: Place) -> None:
    expected = flat(tensors_of())
    with tierfall.open_tensors(run.yaml) as tensors:
        names = [*expected] * 5
        with ThreadPoolExecutor(8) as pool:
            for name, found in zip(names, pool.map(tensors.__getitem__, names), strict=True):
                assert equal(found, expected[name]), name


def test_a_forked_process_reads_what_its_parent_had_begun_to_read(run: Place) -> None:
    """As the worker of a data loader does."""
    whole = tensors_of()["rows"]
    with tierfall.open_tensors(run.yaml) as tensors:
        assert equal(tensors.slice("rows")[:150], whole[:150])
        if not (child := os.fork()):
            try:
                os._exit(not equal(tensors.slice("rows")[150:], whole[150:]))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


# Addresses ---------------------------------------------------------------------------------------------


def test_an_address_is_that_of_a_tier_a_run_a_step_or_a_shard(run: Place) -> None:
    step = f"/run/{folder_of(run, 1).name}"
    for below in ("", "/", "/run", step, f"{step}/{IMAGE}"):
        assert equal(tierfall.load(address(run, below))["big"], tensors_of()["big"]), below
    for below in ("/run/attempts", "/else", f"/run/{IMAGE}"):
        for read in (tierfall.load, tierfall.open_tensors):
            with pytest.raises((ConfigError, RestoreError), match=read.__name__):
                read(address(run, below))
    with pytest.raises(ConfigError, match="step=2"):
        tierfall.load(address(run, step), step=2)


def test_an_address_with_two_runs_asks_for_one_and_a_silent_store_is_no_empty_one(
    place: Place, store: Faulty
) -> None:
    place.config(store=store.tier())
    for name in ("a", "b"):
        with place.open(run=name) as ckpt:
            ckpt.save(1, state_of(1), block=True)
    with pytest.raises(ConfigError, match=r"a, b.*store/a"):
        tierfall.load(address(place))
    assert step_in(tierfall.load(address(place, "/b"))) == 1
    store.set("deny", "", "list")
    store.set("away")
    with pytest.raises(RestoreError, match="could not be read"):
        tierfall.load(address(place))


# The cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def nvme() -> Iterator[Path]:
    """A folder on another file system than the tiers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in kept(folder))


def test_what_a_store_has_sent_once_stays_and_is_verified_again(
    run: Place, nvme: Path, log: Log
) -> None:
    with tierfall.open_tensors(address(run), cache=nvme) as tensors:
        assert equal(tensors["big"], tensors_of()["big"])
        assert set(tensors.sources) == {"store"}
        part = size(nvme)
        assert 0 < part == spent(tensors)
    for folder in (str(nvme), nvme):
        assert equal(tierfall.load(address(run), cache=folder)["wide"], tensors_of()["wide"])
        assert size(nvme) == (folder_of(run, 1) / IMAGE).stat().st_size > part
    with tierfall.open_tensors(address(run), cache=nvme) as tensors:
        [tensors[name] for name in tensors]
        assert set(tensors.sources) == {"cache"}
    damaged, short, folder, pipe, link, *_ = kept(nvme)
    flip(damaged)
    short.write_bytes(b"")
    for path in (folder, pipe, link):
        path.unlink()
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    (nvme / "mine").write_text("not of tierfall")
    for _ in range(2):
        with tierfall.open_tensors(address(run), cache=nvme) as tensors:
            assert all(equal(tensors[n], v) for n, v in flat(tensors_of()).items())
    assert spent(tensors) - tensors.sources["cache"] <= 64 << 10, "one that cannot be replaced"
    assert not log.lines("cache")
    assert (nvme / "mine").read_text() == "not of tierfall"
    assert (next(nvme.glob("tierfall-*")).stat().st_mode & 0o077) == 0


def test_a_packed_copy_is_kept_unpacked_and_what_is_near_is_not_kept(
    run: Place, nvme: Path, tmp_path: Path
) -> None:
    with tierfall.open_tensors(run.root / "far", cache=nvme) as tensors:
        tensors["big"]
        assert size(nvme) == spent(tensors)
    with tierfall.open_tensors(run.root / "disk", cache=nvme) as tensors:
        assert equal(tensors["big"], tensors_of()["big"])
        assert set(tensors.sources) == {"cache"}, "by the digest, wherever it came from"
    tierfall.load(run.root / "far", cache=tmp_path)
    assert not kept(tmp_path), "on the same file system"


def test_the_least_recently_used_chunks_give_way_to_the_size(run: Place, nvme: Path) -> None:
    def read(name: str) -> set[str]:
        with tierfall.open_tensors(address(run), cache=nvme, cache_bytes="400KiB") as tensors:
            assert equal(tensors[name], flat(tensors_of())[name])
            assert size(nvme) <= 400 << 10
            return {*tensors.sources}

    assert read("rows") == {"store"}
    assert read("wide") == {"cache", "store"}, "the header is there"
    assert read("rows") == {"cache"}
    assert "store" in read("big")
    assert read("rows") == {"cache"}
    assert "store" in read("wide")


def test_a_folder_that_cannot_be_used_is_a_warning_and_the_load_goes_on(
    run: Place, nvme: Path, mount: Callable[[Path, str], None], log: Log
) -> None:
    (nvme / "file").touch()
    others = nvme / "others" / f"tierfall-{os.geteuid()}"
    others.mkdir(parents=True)
    others.chmod(0o777)
    mount(nvme / "full", "64k")
    for folder in ("file", "others", "full"):
        words = {"cache_bytes": "1GiB"} if folder == "full" else {}
        loaded = tierfall.load(address(run), cache=nvme / folder, **words)  # type: ignore[arg-type]
        assert equal(loaded["big"], tensors_of()["big"])
        assert len(log.lines(f"cache in .*/{folder} cannot")) == 1
    assert not kept(others)
    for wrong in ({"cache": "s3://bucket"}, {"cache_bytes": "1GiB"}, {"cache": 3}):
        with pytest.raises(ConfigError, match="cache"):
            tierfall.load(run.yaml, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="size"):
        tierfall.load(run.yaml, cache=nvme, cache_bytes=5)


def test_processes_share_it_and_one_that_is_killed_leaves_nothing_that_counts(
    run: Place, nvme: Path
) -> None:
    code = """
        import tests.contract.faulty
        while True:
            loaded = tierfall.load(sys.argv[1], cache=sys.argv[2], cache_bytes="300KiB")
            print(float(loaded["big"].sum()))
    """
    programs = [run.start(code, address(run), str(nvme)) for _ in range(3)]
    expected = str(float(tensors_of()["big"].sum()))
    for count, program in enumerate(programs):
        for _ in range(count + 2):
            assert program.line() == expected, program.errors()
        program.signal(signal.SIGKILL)
    for program in programs:
        program.kill()
    assert size(nvme) <= (300 + 3 * 64) << 10
    assert equal(tierfall.load(address(run), cache=nvme)["big"], tensors_of()["big"])


# diff --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Step 2 has another form; of steps 2 and 3, and 3 and 4, some values differ."""
    with new_place(tmp_path_factory.mktemp("steps")) as place:
        place.config(disk={}, far={"compress": {"codec": "planes"}}, chunk=CHUNK)
        torch.manual_seed(1)
        state = {
            "frozen": torch.ones(100, 300),
            "small": torch.zeros(3, dtype=torch.bfloat16),
            "nan": torch.zeros(4),
            "gone": torch.ones(3),
            "form": torch.ones(3, 4),
            "extra": {"epoch": 1, "nested": {"x": float("nan"), "a": np.arange(4)}},
            "list": [[np.arange(4), 1]],
        }
        with place.open() as ckpt:
            ckpt.save(1, state, block=True)
            del state["gone"]
            state["form"], state["new"] = torch.ones(4, 3), torch.ones(2, dtype=torch.complex64)
            ckpt.save(2, state, block=True)
            state["frozen"][50, 7] += 2
            state["small"][1] = -3
            state["nan"][2] = float("nan")
            state["new"][1] += 3 - 4j
            state["extra"]["epoch"], state["extra"]["nested"]["a"][2] = 2, 9
            state["list"][0][0][1] = 7
            ckpt.save(3, state, block=True)
            state["extra"]["epoch"] = 3
            ckpt.save(4, state, block=True)
        yield place


def test_diff_tells_by_digests_what_differs_and_what_may(steps: Place) -> None:
    found = steps.json("diff", "2", "3", code=1)
    assert [found[side]["step"] for side in "ab"] == [2, 3]
    rows = {each["name"]: each["change"] for each in found["differences"]}
    assert (rows.pop("frozen"), rows.pop("extra.epoch")) == ("differs", "differs")
    assert rows.keys() >= {"small", "nan", "new", "extra", "list"}
    assert {*rows.values()} == {"may differ"}
    answer = steps.cli("diff", "2", "3", code=1)
    assert "2@1 and 3@1: 2 entries differ, " in answer.err
    assert "--values" in answer.err


def test_diff_with_values_reads_what_that_leaves_open(steps: Place) -> None:
    found = steps.json("diff", "2", "3", "--values", code=1)["differences"]
    assert {each["name"]: (each["elements"], each["largest"]) for each in found} == {
        "frozen": (1, 2.0),
        "small": (1, 3.0),
        "nan": (1, "nan"),
        "new": (1, 5.0),
        **dict.fromkeys(("extra.epoch", "extra", "list"), (None, None)),
    }
    assert {each["change"] for each in found} == {"differs"}
    epoch = next(each for each in found if each["name"] == "extra.epoch")
    assert (epoch["a"], epoch["b"]) == ("1", "2")


def test_diff_reads_no_chunk_before_it_is_asked_for_values(steps: Place, tmp_path: Path) -> None:
    folder = tmp_path / "run" / folder_of(steps, 2).name
    shutil.copytree(folder_of(steps, 2), folder)
    flip(folder / IMAGE, (64 << 10) + 1)
    assert "2@1 and 3@1: 2 entries differ" in steps.cli("diff", str(folder), "3", code=1).err
    assert "is damaged" in steps.cli("diff", str(folder), "3", "--values", code=2).err


def test_diff_names_what_one_side_lacks_and_other_forms(steps: Place) -> None:
    for words in ((), ("--values",)):
        rows = {
            each["name"]: each
            for each in steps.json("diff", "1", "2", *words, code=1)["differences"]
        }
        assert (rows["gone"]["change"], rows["gone"]["a"]) == ("only in A", "float32 [3]")
        assert (rows["new"]["change"], rows["new"]["b"]) == ("only in B", "complex64 [2]")
        form = rows["form"]
        assert (form["change"], form["a"], form["b"]) == (
            *("other form", "float32 [3, 4]", "float32 [4, 3]"),
        )
    assert rows.keys() == {"gone", "new", "form"}


def test_diff_of_one_entry_speaks_of_one(steps: Place) -> None:
    err = steps.cli("diff", "3", "4", "--values", code=1).err
    assert err == "tierfall: 3@1 and 4@1: 1 entry differs\n"


def test_diff_ends_as_diff_does_and_takes_paths(steps: Place) -> None:
    other = str(steps.root / "far" / "run")
    assert "are equal" in steps.cli("diff", "4", other).out
    assert steps.json("diff", "latest", "4@1", "--values")["differences"] == []
    for words in (("3", "9"), ("3", "./nowhere"), ("3", "x"), ("3",)):
        assert "diff: " in steps.cli("diff", *words, code=2).err
