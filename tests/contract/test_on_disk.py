"""What is on disk, by docs/format.md: read here without tierfall, by json, safetensors, zstandard and xxhash alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    IMAGE,
    MANIFEST,
    Place,
    blank,
    files_below,
    restored,
    save_steps,
    state_of,
    step_in,
    training_state,
    wait_until,
)
from tierfall.errors import RestoreError

SOON_S = 20.0
CHUNK = 64 * 1024


def document(path: Path) -> dict[str, Any]:
    """Read a document, and compare its digest: SHA-256 over all bytes before it."""
    data = path.read_bytes()
    head, found, tail = data.rpartition(b',"digest":')
    assert found, path
    assert tail == b'"sha256:' + hashlib.sha256(head).hexdigest().encode() + b'"}\n', path
    members = json.loads(data)
    assert list(members)[:2] == ["format", "requires"], path
    assert members["format"] == 1
    assert isinstance(members, dict)
    return members


def seal(path: Path, members: dict[str, Any]) -> None:
    """Write a document as tierfall does."""
    members = {name: value for name, value in members.items() if name != "digest"}
    head = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    path.write_bytes(
        head + b',"digest":"sha256:' + hashlib.sha256(head).hexdigest().encode() + b'"}\n'
    )


def digest_of(data: bytes, like: str) -> str:
    """The digest of some bytes by the algorithm that another one names."""
    algorithm, _, digits = like.partition(":")
    computed = {
        "xxh3-128": lambda: xxhash.xxh3_128_hexdigest(data),
        "sha256": lambda: hashlib.sha256(data).hexdigest(),
    }[algorithm]()
    assert len(digits) == len(computed)
    return f"{algorithm}:{computed}"


def header_of(image: Path) -> tuple[dict[str, Any], int]:
    """The header of an image, and where its tensors begin."""
    data = image.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


STATE: dict[str, Any] = {
    "a.b": {"x/y": torch.arange(3000, dtype=torch.float64)},
    "half": torch.ones(5, 7, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex128),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7, dtype=torch.int32),
    "values": {"epoch": 3, "name": "ü", "pair": (1, 2.5), 7: None},
    "rng": {},
}


class Saved:
    """A run that is saved once for all tests that only read it."""

    def __init__(self, place: Place) -> None:
        place.config(
            host={"capacity": "16MiB"},
            a={},
            b={"compress": {"codec": "zstd"}},
            c={"compress": {"codec": "planes"}},
            d={"shared": True},
        )
        self.model = training_state()
        with place.open() as ckpt:
            ckpt.save(
                7, {**STATE, "model": self.model}, metrics={"loss": 0.5}, tags=["t"], block=True
            )
            ckpt.save(123456789, {"w": torch.ones(10)}, block=True)
        self.root = place.root
        self.a, self.b, self.c, self.d = (
            place.root / name / "run" / "step-00000007-a0001" for name in "abcd"
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(Place(tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("memory")))


# An image --------------------------------------------------------------------------------------------


def test_an_image_is_a_safetensors_file_that_other_programs_read(saved: Saved) -> None:
    found = load_file(saved.a / IMAGE)
    assert found["half"].equal(STATE["half"])
    assert found["scalar"].equal(STATE["scalar"])
    assert found["empty"].equal(STATE["empty"])
    assert found["turned"].equal(STATE["turned"])
    assert found["a%2Eb.x%2Fy"].equal(STATE["a.b"]["x/y"])
    model = saved.model["model"].state_dict()
    assert all(found[f"model.model.{name}"].equal(value) for name, value in model.items())


def test_an_image_has_tensors_in_their_order_without_holes(saved: Saved) -> None:
    """By item size, the largest first, then by name; from a multiple of 64 KiB on."""
    header, start = header_of(saved.a / IMAGE)
    size = (saved.a / IMAGE).stat().st_size
    assert start % 65536 == 0
    assert start == document(saved.a / MANIFEST)["data_start"]
    entries = {name: e for name, e in header.items() if name != "__metadata__"}
    at = 0
    for entry in sorted(entries.values(), key=lambda e: e["data_offsets"]):
        assert entry["data_offsets"][0] == at
        at = entry["data_offsets"][1]
    assert start + at == size == document(saved.a / MANIFEST)["image_bytes"]
    widths = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "U8": 1}
    own = json.loads(header["__metadata__"]["tierfall"])
    ordered = sorted(
        (name for name, e in entries.items() if e["data_offsets"][0] < e["data_offsets"][1]),
        key=lambda name: entries[name]["data_offsets"],
    )
    sizes = [16 if name == "complex" else widths[entries[name]["dtype"]] for name in ordered]
    assert "complex" in str(own["dtypes"])
    assert sizes == sorted(sizes, reverse=True)
    for width in set(sizes):
        names = [name for name, s in zip(ordered, sizes, strict=True) if s == width]
        assert names == sorted(names)


def test_what_is_no_tensor_is_json_in_the_header_and_nothing_is_pickled(saved: Saved) -> None:
    with safe_open(saved.a / IMAGE, "pt") as image:
        metadata = image.metadata()
    assert metadata["format"] == "pt"
    own = json.loads(metadata["tierfall"])
    assert own["format"] == 1
    assert {"requires", "tree", "table"} <= own.keys()
    assert "complex" in str(own["dtypes"])  # safetensors has no name for it
    values = json.loads(metadata["tierfall.values"])
    assert "tuple" in json.dumps(values)
    assert "ü" in json.dumps(values, ensure_ascii=False)
    for path in saved.root.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".safetensors"):
            assert b"ctorch" not in path.read_bytes()
            assert b"cnumpy" not in path.read_bytes()


def test_a_manifest_has_the_digest_of_each_chunk_and_where_each_tensor_is(saved: Saved) -> None:
    manifest = document(saved.a / MANIFEST)
    assert (manifest["run"], manifest["step"], manifest["attempt"]) == ("run", 7, 1)
    assert (manifest["rank"], manifest["world_size"], manifest["chunk_bytes"]) == (0, 1, CHUNK)
    assert (manifest["ordinal"], manifest["started_from"]) == (1, None)
    data = (saved.a / IMAGE).read_bytes()
    start = manifest["data_start"]
    chunks = [data[:start], *(data[at : at + CHUNK] for at in range(start, len(data), CHUNK))]
    assert manifest["chunks"] == [
        f"xxh3-128:{xxhash.xxh3_128_hexdigest(chunk)}" for chunk in chunks
    ]
    header, _ = header_of(saved.a / IMAGE)
    for piece in manifest["pieces"]:
        assert header[piece["name"]]["data_offsets"] == [piece["start"], piece["end"]]
        assert piece["lengths"] == piece["shape"]
        assert header[piece["name"]]["shape"] == piece["shape"] or piece["name"] == "complex"
    assert {p["name"] for p in manifest["pieces"]} | {"__metadata__"} == header.keys()


def test_a_commit_record_names_every_file_with_its_length_and_digest(saved: Saved) -> None:
    for folder in (saved.a, saved.b, saved.c, saved.d):
        record = document(folder / "commit.json")
        assert (record["run"], record["step"], record["attempt"]) == ("run", 7, 1)
        assert (record["world_size"], record["metrics"], record["tags"]) == (
            1,
            {"loss": 0.5},
            ["t"],
        )
        assert abs(record["wall_time_s"] - folder.stat().st_mtime) < 3600
        assert len(record["nodes"]) == 1
        names = {entry["name"] for entry in record["files"]}
        assert names | {"commit.json"} == {p.name for p in folder.iterdir() if p.is_file()}
        for entry in record["files"]:
            data = (folder / entry["name"]).read_bytes()
            assert entry["bytes"] == len(data)
            if "digest" in entry:
                assert entry["digest"] == digest_of(data, entry["digest"])
            else:
                assert ".safetensors" in entry["name"]


# Tiers -----------------------------------------------------------------------------------------------


def test_image_and_manifest_are_the_same_on_every_tier(saved: Saved) -> None:
    manifests = {
        (folder / MANIFEST).read_bytes() for folder in (saved.a, saved.b, saved.c, saved.d)
    }
    assert len(manifests) == 1
    assert (saved.a / IMAGE).read_bytes() == (saved.d / IMAGE).read_bytes()


def test_an_image_that_zstd_packed_is_unpacked_by_zstd_alone(saved: Saved) -> None:
    """One frame for each chunk, whose place ``stored.json`` has; then a skippable frame, the seek table."""
    packed = (saved.b / f"{IMAGE}.zst").read_bytes()
    raw = (saved.a / IMAGE).read_bytes()
    assert zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read() == raw
    table = document(saved.b / MANIFEST.replace(".json", ".stored.json"))
    assert (table["codec"], table["raw_bytes"]) == ("zstd", len(raw))
    at, frames = 0, list(zip(table["offsets"], table["lengths"], strict=True))
    start = document(saved.b / MANIFEST)["data_start"]
    edges = [0, *range(start, len(raw), CHUNK), len(raw)]
    for number, (offset, length) in enumerate(frames):
        assert offset == at
        at += length
        chunk = zstandard.ZstdDecompressor().decompressobj().decompress(packed[offset:at])
        assert chunk == raw[edges[number] : edges[number + 1]]
    assert packed[at : at + 4] == (0x184D2A5E).to_bytes(4, "little")


def test_planes_sort_the_bytes_of_a_chunk_by_their_place_in_an_item(saved: Saved) -> None:
    packed = (saved.c / f"{IMAGE}.tfz").read_bytes()
    raw = (saved.a / IMAGE).read_bytes()
    table = document(saved.c / MANIFEST.replace(".json", ".stored.json"))
    start = document(saved.c / MANIFEST)["data_start"]
    edges = [0, *range(start, len(raw), CHUNK), len(raw)]
    for number, (offset, length, width) in enumerate(
        zip(table["offsets"], table["lengths"], table["widths"], strict=True)
    ):
        frame = packed[offset : offset + length]
        planes = zstandard.ZstdDecompressor().decompressobj().decompress(frame)
        chunk = raw[edges[number] : edges[number + 1]]
        assert len(planes) == len(chunk)
        if len(chunk) % width == 0:
            assert planes == b"".join(chunk[plane::width] for plane in range(width))


NAMES = [
    r"tier\.json",
    r"latest",
    r"attempts/a\d{4}\.json",
    r"lineage/a\d{4}-[0-9a-f]+-\d+-(anew|step-\d{8,}-a\d{4})\.json",
    r"step-\d{8,}-a\d{4}/rank-\d{5}-of-\d{5}\.(safetensors(\.zst|\.tfz)?|json|stored\.json)",
    r"step-\d{8,}-a\d{4}/commit\.json",
]


def test_a_tier_has_the_documented_names_and_nothing_else(saved: Saved) -> None:
    """Nothing unfinished, nothing outside of the run's folder."""
    for tier in "abcd":
        for name in files_below(saved.root / tier):
            assert name.startswith("run/")
            if "/marks" not in name:
                assert any(re.fullmatch(f"run/{pattern}", name) for pattern in NAMES), name
        assert (saved.root / tier / "run/step-123456789-a0001/commit.json").exists()


def test_latest_names_the_newest_step_and_goes_back_only_by_a_deletion(place: Place) -> None:
    latest = place.root / "disk/run/latest"
    place.config()
    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            wait_until(
                lambda s=step: latest.exists() and latest.read_text() == f"step-{s:08d}-a0001\n",  # type: ignore[misc]
                "latest follows",
            )
        ckpt.delete(2)
        wait_until(lambda: latest.read_text() == "step-00000001-a0001\n", "latest goes back")


def test_an_attempt_is_recorded_once_for_each_start_and_the_lineage_with_its_first_commit(
    place: Place,
) -> None:
    place.config()
    run = place.root / "disk/run"
    place.save(1, 2)
    first = (run / "attempts/a0001.json").read_bytes()
    with place.open() as ckpt:
        ckpt.restore(blank(), step=1)
        assert len(list((run / "lineage").iterdir())) == 1
        ckpt.save(2, state_of(2), block=True)
    record = document(run / "step-00000002-a0002/commit.json")
    assert record["started_from"] == {"step": 1, "attempt": 1}
    with place.open(fresh=True) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    place.cli("ls")  # a command takes none
    assert (run / "attempts/a0001.json").read_bytes() == first
    records = [document(path) for path in sorted((run / "attempts").iterdir())]
    assert [r["attempt"] for r in records] == [1, 2, 3]
    assert len({r["attempt_id"] for r in records}) == 3
    assert all(r["run"] == "run" and r["node"] and r["pid"] == os.getpid() for r in records)
    lineage = {}
    for path in (run / "lineage").iterdir():
        found = document(path)
        lineage[found["attempt"]] = (path.name, found["started_from"])
        assert found["attempt_id"] == records[found["attempt"] - 1]["attempt_id"]
    assert lineage[1][0].endswith("-anew.json")
    assert lineage[2][0].endswith("-step-00000001-a0001.json")
    assert lineage[2][1] == {"step": 1, "attempt": 1}
    assert lineage[3][0].endswith("-anew.json")
    assert lineage[3][1] is None


def test_a_pointer_is_a_document_that_names_step_and_tiers(place: Place) -> None:
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        ckpt.save(5, state_of(5), block=True)
        ckpt.write_pointer(place.root / "out/checkpoint-5", 5)
    found = document(place.root / "out/checkpoint-5/tierfall.json")
    assert (found["run"], found["step"], found["attempt"]) == ("run", 5, 1)
    assert [(t["name"], t["kind"]) for t in found["tiers"]] == [
        ("host", "host"),
        ("disk", "file"),
        ("pfs", "file"),
    ]
    assert found["tiers"][1]["path"] == str(place.root / "disk")
    assert step_in(tierfall.load(place.root / "out/checkpoint-5")) == 5
    pointer = tierfall.read_pointer(place.root / "out/checkpoint-5")
    assert (pointer.run, pointer.step, pointer.attempt) == ("run", 5, 1)


# The order of writes ---------------------------------------------------------------------------------


def test_the_commit_record_is_written_last(place: Place, store: Faulty) -> None:
    """Before it there is no checkpoint, though all its files are whole."""
    place.config(store=store.tier())
    with place.open() as ckpt:
        store.set("hang", "commit.json", call="put")
        handle = ckpt.save(1, state_of(1))
        wait_until(lambda: store.struck("hang"), "everything else is written")
        folder = store.folder / "run/step-00000001-a0001"
        assert {p.name for p in folder.iterdir() if p.is_file()} == {IMAGE, MANIFEST}
        assert step_in({"w": load_file(folder / IMAGE)["w"], "extra": {"step": 1}}) == 1
        assert not handle.done()
        with pytest.raises(RestoreError):
            tierfall.load(store.folder)
        store.heal()
        handle.wait(timeout=SOON_S)
    assert step_in(tierfall.load(place.yaml)) == 1


@pytest.fixture
def calls(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the system is asked to do below the tier ``disk``: what, and the path (of a link or rename, the new one)."""
    found: list[tuple[str, str]] = []
    root = str(place.root / "disk")

    def path_of(name: Any, folder: int | None) -> str:
        if isinstance(name, int):
            return os.readlink(f"/proc/self/fd/{name}")
        return os.path.join(
            os.readlink(f"/proc/self/fd/{folder}") if folder else "", os.fspath(name)
        )

    def record(call: str, what: str, position: int, folder: str) -> None:
        real: Callable[..., Any] = getattr(os, call)

        def stand_in(*words: Any, **more: Any) -> Any:
            path = path_of(words[position], more.get(folder))
            done = real(*words, **more)
            if path.startswith(root):
                found.append((what, path))
            return done

        monkeypatch.setattr(os, call, stand_in)

    record("fsync", "sync", 0, "")
    record("fdatasync", "sync", 0, "")
    record("mkdir", "mkdir", 0, "dir_fd")
    record("unlink", "unlink", 0, "dir_fd")
    for call in ("link", "rename", "replace"):
        record(call, "publish", 1, "dst_dir_fd")
    return found


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_everything_is_synced_before_the_commit_record_and_that_before_it_is_reported(
    place: Place, calls: list[tuple[str, str]], codec: str
) -> None:
    place.config(disk={"compress": {"codec": codec}})
    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            reported = len(calls)
            folder = str(place.root / f"disk/run/step-{step:08d}-a0001")
            mine = calls[:reported]
            commit = mine.index(("publish", f"{folder}/commit.json"))
            others = [
                n
                for n, (what, p) in enumerate(mine)
                if what == "publish" and p.startswith(folder) and n != commit
            ]
            assert others
            assert max(others) < commit
            synced = [n for n, call in enumerate(mine) if call == ("sync", folder)]
            assert any(max(others) < n < commit for n in synced), "the folder, with the other files"
            assert any(n > commit for n in synced), "the folder, with the record"
            made = mine.index(("mkdir", folder))
            above = [n for n, call in enumerate(mine) if call == ("sync", os.path.dirname(folder))]
            assert any(made < n < commit for n in above), "the folder of the run"
            files = [
                n
                for n, (what, p) in enumerate(mine)
                if what == "sync" and p.startswith(f"{folder}/")
            ]
            assert len([n for n in files if n < commit]) >= len(others) + 1, (
                "each file, the record too"
            )


def test_a_deletion_removes_the_commit_record_first_and_syncs_that(
    place: Place, calls: list[tuple[str, str]]
) -> None:
    place.config(disk={"retain": {"last": 1}})
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        wait_until(lambda: len(place.folders()) == 1, "step 1 goes")
        ckpt.drain()
    folder = str(place.root / "disk/run/step-00000001-a0001")
    gone = [p for what, p in calls if what == "unlink" and p.startswith(folder)]
    gone = [p for p in gone if not Path(p).name.startswith(".")]  # of files that are being written
    successor = calls.index(
        ("publish", str(place.root / "disk/run/step-00000002-a0001/commit.json"))
    )
    record = calls.index(("unlink", f"{folder}/commit.json"))
    image = calls.index(("unlink", f"{folder}/{IMAGE}"))
    assert successor < record < image
    assert gone[0] == f"{folder}/commit.json"
    assert any(record < n < image for n, call in enumerate(calls) if call == ("sync", folder))


# Documents of others ---------------------------------------------------------------------------------


@pytest.fixture
def two(place: Place) -> Path:
    """The folder of step 2 of a run with two steps."""
    place.config()
    place.save(1, 2)
    return place.folders()[1]


def test_members_that_a_reader_does_not_know_are_ignored(place: Place, two: Path) -> None:
    record = json.loads((two / "commit.json").read_bytes())
    record.pop("digest")
    seal(two / "commit.json", {**record, "of_the_future": [1, {"x": None}]})
    document(two / "commit.json")
    assert place.restored().step == 2


@pytest.mark.parametrize("member", [{"format": 2}, {"requires": ["of-the-future"]}])
@pytest.mark.parametrize("file", ["commit.json", MANIFEST])
def test_a_newer_format_is_refused_with_advice_and_never_called_damaged(
    place: Place, two: Path, file: str, member: dict[str, Any]
) -> None:
    record = {**json.loads((two / file).read_bytes()), **member}
    seal(two / file, record)
    if file == MANIFEST:  # as the newer version that wrote it would have named it
        commit = json.loads((two / "commit.json").read_bytes())
        for entry in commit["files"]:
            if entry["name"] == MANIFEST:
                data = (two / file).read_bytes()
                entry.update(bytes=len(data), digest=digest_of(data, entry["digest"]))
        seal(two / "commit.json", commit)
    with place.open() as ckpt, pytest.raises(RestoreError, match=r"(?s)newer|version"):
        ckpt.restore(blank())
    assert place.ls()["2@1"]["disk"] in ("unreadable", "committed")
    assert not any("damaged" in p for p in place.json("verify", code=-1).get("problems", []))
    assert (two / IMAGE).exists()


def test_a_record_whose_digest_is_wrong_is_damage_and_never_absence(
    place: Place, two: Path
) -> None:
    data = (two / "commit.json").read_bytes()
    (two / "commit.json").write_bytes(data.replace(b'"step":2', b'"step":3'))
    assert place.cli("ls", code=-1).out.count("damaged") >= 1
    with place.open() as ckpt:
        report = restored(ckpt)
        assert report.step == 1
        assert any("2@1" in f"{f.what} {f.id}" for f in report.fallbacks)
    assert (two / IMAGE).exists()


def test_a_folder_without_a_commit_record_is_no_checkpoint(place: Place, two: Path) -> None:
    """Once ``latest`` names another: its files are what a killed process had begun to write."""
    (two / "commit.json").unlink()
    (two.parent / "latest").write_text("step-00000001-a0001\n")
    state = blank()
    with place.open() as ckpt:
        assert ckpt.restore(state) is not None
        assert step_in(state) == 1
        ckpt.save(2, state_of(2), block=True)
        wait_until(lambda: not two.exists(), "what was unfinished is collected")
