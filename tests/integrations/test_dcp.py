"""DCP in one process: what it saves through a TierWriter is a checkpoint of the run."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tierfall
from tests.core.capture.lazy_help import Trainer
from tests.integrations.dcp_help import QUIET, Bomb, Counter, bomb, copied, emptied, nested, same
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    FlushError,
    IntegrityError,
    StepError,
    UnreachableError,
)
from tierfall.integrations.dcp import TierReader, TierSavePlanner, TierWriter
from tierfall.integrations.dcp.planning import CompleteLoadPlanner

pytestmark = pytest.mark.filterwarnings(QUIET)

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def trainer() -> Trainer:
    trainer = Trainer()
    trainer.step()
    return trainer


def raised(error: CheckpointException) -> BaseException:
    """What rank 0 raised."""
    return error.failures[0][0]


# Saving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, TierSavePlanner])
def test_a_save_is_a_checkpoint_of_the_run_like_any_other(
    planner: type[DefaultSavePlanner] | None,
    make_config: MakeConfig,
    tmp_path: Path,
    trainer: Trainer,
) -> None:
    state = nested(trainer, names=["a", "b"], both=(1, "x"), parts=[{"n": 1}, {"w": torch.ones(3)}])
    with tierfall.open(make_config()) as ckpt:
        writer = TierWriter(ckpt, step=1, until="disk", metrics={"loss": 0.5}, tags=["first"])
        dcp.save(state, storage_writer=writer, planner=planner and planner())
        (info,) = ckpt.checkpoints()
        assert (info.step, sorted(info.tiers)) == (1, ["disk", "host"])
        assert (info.metrics, info.tags) == ({"loss": 0.5}, ("first",))
        loaded = emptied(state)
        assert not same(loaded, state)
        dcp.load(loaded, storage_reader=TierReader(ckpt))
        assert same(loaded, state)
    assert same(tierfall.load(tmp_path / "disk"), state)
    (shard,) = (tmp_path / "disk" / "run").glob("*/rank-*.safetensors")
    tensors = safetensors.torch.load_file(shard)
    assert torch.equal(tensors["model.0%2Eweight"], trainer.model[0].weight)


def test_restore_takes_what_dcp_saved(make_config: MakeConfig, trainer: Trainer) -> None:
    state = nested(trainer)
    with tierfall.open(make_config()) as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1, until="disk"))
    with tierfall.open(make_config()) as ckpt:
        found = emptied(state)
        report = ckpt.restore(found)
        assert report is not None
        assert report.step == 1
        assert same(found, state)


def test_a_save_is_done_once_it_is_sealed_in_memory(
    make_config: MakeConfig, trainer: Trainer
) -> None:
    with tierfall.open(make_config(disk={"flush": {"every": 100}})) as ckpt:
        dcp.save(nested(trainer), storage_writer=TierWriter(ckpt, step=1))
        assert [sorted(c.tiers) for c in ckpt.checkpoints()] == [["host"]]


def test_plans_that_dcp_caches_serve_several_saves(
    make_config: MakeConfig, tmp_path: Path, trainer: Trainer
) -> None:
    class Planner(TierSavePlanner):
        """A cache of its own."""

    saved, metadata = [], []
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            trainer.step()
            state = nested(trainer, step=step)
            saved.append(copied(state))
            writer = TierWriter(ckpt, step=step, until="disk")
            planner = Planner(enable_plan_caching=True)
            metadata.append(dcp.save(state, storage_writer=writer, planner=planner))
    assert metadata[1] is metadata[2], "DCP hands out its cached object"
    assert all(m.storage_data is None for m in metadata), "nothing of one checkpoint stands there"
    for step, state in enumerate(saved, 1):
        assert same(tierfall.load(tmp_path / "disk", step=step), state)


def test_stateful_objects_come_back(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        state = {"counter": Counter(7, torch.arange(3.0))}
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        other = Counter(0, torch.zeros(3))
        dcp.load({"counter": other}, storage_reader=TierReader(ckpt))
    assert other.count == 7
    assert other.values.tolist() == [0, 1, 2]


def test_an_object_that_dcp_would_pickle_is_refused_by_name(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        for value, output in [
            ({"inner": Counter(1, torch.ones(1))}, "entry.inner is an object with a state_dict"),
            ({"f": object()}, r'state\["entry"\]\["f"\]'),
        ]:
            with pytest.raises(CheckpointException) as caught:
                dcp.save({"entry": value}, storage_writer=TierWriter(ckpt, step=1))
            assert isinstance(raised(caught.value), CaptureError)
            assert caught.match(output)
        dcp.save({"entry": 1}, storage_writer=TierWriter(ckpt, step=2))


def test_a_writer_is_for_one_step_and_for_a_step_that_follows(make_config: MakeConfig) -> None:
    state = {"w": torch.ones(3)}
    with tierfall.open(make_config()) as ckpt:
        writer = TierWriter(ckpt, step=2)
        dcp.save(state, storage_writer=writer)
        with pytest.raises(CheckpointException, match="used for step 2"):
            dcp.save(state, storage_writer=writer)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        assert isinstance(raised(caught.value), StepError)
        with pytest.raises(ConfigError, match="no tier is named 'disc'; there are host, disk"):
            TierWriter(ckpt, step=3, until="disc")
        with pytest.raises(ConfigError, match="leave it out"):
            dcp.save(state, checkpoint_id="x", storage_writer=TierWriter(ckpt, step=3))
        with pytest.raises(ConfigError, match="leave it out"):
            dcp.load(state, checkpoint_id="x", storage_reader=TierReader(ckpt))


def test_a_tier_without_room_fails_the_save(make_config: MakeConfig) -> None:
    with tierfall.open(make_config(host={"capacity": "64KiB"})) as ckpt:
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"w": torch.ones(1 << 20)}, storage_writer=TierWriter(ckpt, step=1))
        assert isinstance(raised(caught.value), CapacityError)
        assert ckpt.checkpoints() == []


def test_an_item_that_nobody_wrote_is_counted(make_config: MakeConfig) -> None:
    class Forgetful(TierWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata=metadata, results=[of_rank[1:] for of_rank in results])

    with tierfall.open(make_config()) as ckpt, pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=Forgetful(ckpt, step=1))
    assert isinstance(raised(caught.value), FlushError)
    assert caught.match("1 planned items were written by no rank: w")


def test_a_planner_may_change_tensors_on_their_way(make_config: MakeConfig) -> None:
    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            found = super().transform_object(write_item, object)
            return found.to(torch.float16) if isinstance(found, torch.Tensor) else found

    with tierfall.open(make_config()) as ckpt:
        state = {"w": torch.tensor([0.5, 2.0])}
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1), planner=Halving())
        half, whole = torch.zeros(2, dtype=torch.float16), torch.zeros(4)[::2]
        dcp.load({"w": half}, storage_reader=TierReader(ckpt, resume=False))
        dcp.load({"w": whole}, storage_reader=TierReader(ckpt))
    assert half.tolist() == whole.tolist() == [0.5, 2.0]


# Loading ---------------------------------------------------------------------------------------------


def test_a_part_of_a_checkpoint_is_loaded_alone(make_config: MakeConfig, trainer: Trainer) -> None:
    state = nested(trainer)
    with tierfall.open(make_config()) as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        part = {"model": emptied(state["model"])}
        dcp.load(part, storage_reader=TierReader(ckpt))
        assert same(part["model"], state["model"])
        more = {"model": emptied(state["model"]), "new": torch.full((2,), 9.0)}
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
            dcp.load(more, storage_reader=TierReader(ckpt))
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(more, storage_reader=TierReader(ckpt), planner=planner)
        assert same(more["model"], state["model"])
        assert more["new"].tolist() == [9, 9]


def test_a_whole_checkpoint_is_loaded_without_a_state(
    make_config: MakeConfig, trainer: Trainer
) -> None:
    state = nested(trainer, parts=[{"n": 1}, {"w": torch.ones(3)}])
    with tierfall.open(make_config()) as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        found = _load_state_dict_from_keys(storage_reader=TierReader(ckpt))
    assert same(found["model"], dict(state["model"]))
    assert same(found["optim"], state["optim"])
    assert same(found["extra"], state["extra"])


def test_load_takes_what_the_checkpointer_saved(make_config: MakeConfig, trainer: Trainer) -> None:
    state = nested(trainer)
    with tierfall.open(make_config()) as ckpt:
        mine = {"model": trainer.model, "optim": trainer.optimizer, "extra": {"epoch": 3}}
        ckpt.save(1, {**mine, "scheduler": Counter(4, torch.ones(2))}, block=True)
        found = emptied(state)
        other = Counter(0, torch.zeros(2))
        dcp.load({**found, "scheduler": other}, storage_reader=TierReader(ckpt))
    assert same(found, state)
    assert (other.count, other.values.tolist()) == (4, [1, 1])


def test_the_run_goes_on_from_what_is_loaded(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            dcp.save({"n": step}, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(CheckpointException, match="this start restored none"):
            dcp.save({"n": 3}, storage_writer=TierWriter(ckpt, step=3))
        state = {"n": 0}
        dcp.load(state, storage_reader=TierReader(ckpt, step=1, resume=False))
        assert state == {"n": 1}
        with pytest.raises(CheckpointException, match="this start restored none"):
            dcp.save({"n": 3}, storage_writer=TierWriter(ckpt, step=3))
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state == {"n": 2}
        dcp.save({"n": 3}, storage_writer=TierWriter(ckpt, step=3, until="disk"))
        assert [(c.step, c.abandoned) for c in ckpt.checkpoints()] == [
            (1, False),
            (2, False),
            (3, False),
        ]
        dcp.load(state, storage_reader=TierReader(ckpt, step=1))
        dcp.save({"n": 2}, storage_writer=TierWriter(ckpt, step=2, until="disk"))
        assert (2, 3) in {(c.step, c.attempt) for c in ckpt.checkpoints()}
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state == {"n": 2}


def test_a_damaged_chunk_is_read_from_the_next_tier_and_without_one_is_an_error(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={}, slow={})
    state = {"w": torch.arange(64 << 10, dtype=torch.float32)}
    with tierfall.open(config) as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1, until="slow"))
    _flip_last_byte(tmp_path / "disk")
    with tierfall.open(config) as ckpt:
        found = {"w": torch.zeros(64 << 10)}
        with pytest.raises(CheckpointException) as caught:
            dcp.load(found, storage_reader=(reader := TierReader(ckpt, tier="disk")))
        assert isinstance(raised(caught.value), IntegrityError)
        assert reader.damaged
        dcp.load(found, storage_reader=TierReader(ckpt))
        assert same(found, state)


def test_a_header_that_is_damaged_everywhere_gives_way_to_the_older_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            dcp.save({"n": step}, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    _damage_header(tmp_path / "disk", 2)
    with tierfall.open(make_config()) as ckpt:
        state = {"n": 0}
        with pytest.raises(CheckpointException, match=r"dcp\.load of 2@1"):
            dcp.load(state, storage_reader=(reader := TierReader(ckpt, step=2)))
        assert reader.damaged
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state == {"n": 1}


def test_a_planner_that_leaves_no_tensor_out(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        saved = {"kept": torch.ones(3), "other": {"left": torch.ones(2), "n": 1}}
        dcp.save(saved, storage_writer=TierWriter(ckpt, step=1))
        found = {"kept": torch.zeros(3)}
        with pytest.raises(CheckpointException, match=r"1 tensors that .* such as other\.left"):
            dcp.load(found, storage_reader=TierReader(ckpt), planner=CompleteLoadPlanner())
        assert found["kept"].sum() == 0
        dcp.load(found, storage_reader=TierReader(ckpt), planner=CompleteLoadPlanner(["other"]))
        assert found["kept"].sum() == 3


@pytest.mark.parametrize("first_byte", [0, 1 << 18])
def test_what_could_not_be_read_is_not_taken_for_damaged(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, first_byte: int
) -> None:
    """Neither a header nor tensors."""
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            state = {"n": step, "w": torch.full((1 << 17,), float(step))}
            dcp.save(state, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    read_into = PosixBackend.read_into

    def away(self: PosixBackend, key: str, offset: int, view: memoryview) -> None:
        if "step-00000002" in key and key.endswith(".safetensors") and offset >= first_byte:
            raise UnreachableError(f"{key} is away for a moment")
        read_into(self, key, offset, view)

    with tierfall.open(make_config()) as ckpt, monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "read_into", away)
        state = {"n": 0, "w": torch.zeros(1 << 17)}
        with pytest.raises(CheckpointException, match="is away for a moment"):
            dcp.load(state, storage_reader=(reader := TierReader(ckpt)))
        assert not reader.damaged
        patch.undo()
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state["n"] == 2


def test_without_a_checkpoint_load_says_so(make_config: MakeConfig) -> None:
    with (
        tierfall.open(make_config()) as ckpt,
        pytest.raises(CheckpointException, match="run run holds no checkpoint"),
    ):
        dcp.load({"n": 0}, storage_reader=TierReader(ckpt))


def test_nothing_in_a_checkpoint_is_unpickled(make_config: MakeConfig, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    torch.load(io.BytesIO(_torch_saved(crater)), weights_only=False)
    assert crater.exists(), "it is a bomb"
    crater.unlink()
    charges: dict[str, Any] = {
        "short": bomb(crater),
        "long": bomb(crater) + bytes(100_000),
        "file": _torch_saved(crater),
        "tensor": torch.frombuffer(bytearray(_torch_saved(crater)), dtype=torch.uint8),
    }
    with tierfall.open(make_config()) as ckpt:
        dcp.save({"x": charges}, storage_writer=TierWriter(ckpt, step=1))
        ckpt.save(2, {"x": charges}).captured()
        for step in (1, 2):
            found = {"x": {**dict.fromkeys(charges), "tensor": torch.zeros_like(charges["tensor"])}}
            dcp.load(found, storage_reader=TierReader(ckpt, step=step, resume=False))
            assert same(found["x"], charges)
    assert not crater.exists()


def test_names_that_dcp_cannot_tell_apart_are_refused(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"a.b": 1, "a": {"b": torch.ones(1)}}, block=True)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"a.b": 0}, storage_reader=TierReader(ckpt))
    assert caught.match("have the same name 'a.b' in DCP")


def test_what_is_opened_stays_on_its_tier_until_it_was_read(make_config: MakeConfig) -> None:
    """Between DCP's two calls other saves may go on, in threads of DCP's own."""

    class Slow(TierReader):
        def set_up_storage_reader(self, *given: Any, **named: Any) -> None:
            for step in (2, 3, 4):
                dcp.save(large(step), storage_writer=TierWriter(ckpt, step=step, until="disk"))
            ckpt.prune()
            assert on_disk(ckpt) == [1, 4]
            assert 1 not in [c.step for c in ckpt.checkpoints() if "host" in c.tiers]

    config = make_config(disk={"retain": {"last": 1}}, host={"capacity": "3MiB"})
    with tierfall.open(config) as ckpt:
        dcp.save(large(1), storage_writer=TierWriter(ckpt, step=1, until="disk"))
        found = large(0)
        kept = Slow(ckpt, step=1, resume=False)
        dcp.load(found, storage_reader=kept)
        assert same(found, large(1))
        ckpt.drain(20)
        assert on_disk(ckpt) == [4], "it goes without being asked"


@pytest.mark.parametrize("end", ["garbage", "reset", "asked again"])
def test_what_is_opened_and_not_read_is_held_no_longer_than_its_reader_wants_it(
    make_config: MakeConfig, end: str
) -> None:
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        dcp.save(large(1), storage_writer=TierWriter(ckpt, step=1, until="disk"))
        reader = TierReader(ckpt, resume=False)
        reader.read_metadata()
        dcp.save(large(2), storage_writer=TierWriter(ckpt, step=2, until="disk"))
        ckpt.prune()
        assert on_disk(ckpt) == [1, 2]
        match end:
            case "garbage":
                del reader
                gc.collect()
            case "reset":
                reader.reset()
            case _:
                reader.read_metadata()
        ckpt.drain(20)
        assert on_disk(ckpt) == [2]


def large(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300_000,), float(step))}


def on_disk(ckpt: tierfall.Checkpointer) -> list[int]:
    return [c.step for c in ckpt.checkpoints() if "disk" in c.tiers]


def test_metadata_is_made_a_tensor_at_a_time(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    init = TensorStorageMetadata.__init__

    def counting(self: Any, *given: Any, **more: Any) -> None:
        made.append(self)
        init(self, *given, **more)

    with tierfall.open(make_config()) as ckpt:
        state = {f"w{i}": torch.ones(2) for i in range(50)}
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        monkeypatch.setattr(TensorStorageMetadata, "__init__", counting)
        metadata = TierReader(ckpt).read_metadata()
        assert len(metadata.state_dict_metadata) == 50
        assert not made
        assert metadata.state_dict_metadata["w7"].size == (2,)  # type: ignore[union-attr]
        assert len(made) == 1


def test_tierfall_alone_does_not_load_dcp() -> None:
    program = "import sys, tierfall; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def _torch_saved(crater: Path) -> bytes:
    saved = io.BytesIO()
    torch.save(Bomb(crater), saved)
    return saved.getvalue()


def _damage_header(tier: Path, step: int) -> None:
    (image,) = tier.glob(f"run/step-{step:08d}-*/*.safetensors")
    data = bytearray(image.read_bytes())
    data[40] ^= 1
    image.write_bytes(data)


def _flip_last_byte(tier: Path) -> None:
    for image in tier.glob("run/step-*/rank-*.safetensors"):
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.write_bytes(data)
