"""How things are named on a tier: pure functions between values and keys, and nothing else.

    <run>/attempts/a0007.json
    <run>/lineage/a0007-<attempt id>-<milliseconds>-step-00000300-a0006.json, or -anew.json
    <run>/step-00000400-a0007/rank-00000-of-00004.safetensors, .json, commit.json, marks/<name>
    <run>/step-00000400-a0007/index.zst: the merged index of several ranks
    <run>/step-00000400-a0007/rank-00000-of-00004.safetensors.zst or .safetensors.tfz, .stored.json: a packed image
    <run>/latest
    <run>/tier.json: which tier this is
    <run>/marks-changed: another text after each mark that a person leaves or takes away

Numbers are padded to at least these widths and compared as integers. A name that does not parse is not ours: it is
never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import CheckpointId, Codec, Shard

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
COMMIT_NAME = "commit.json"
INDEX_NAME = "index.zst"
LATEST_NAME = "latest"
TIER_NAME = "tier.json"
MARKS_CHANGED_NAME = "marks-changed"
ATTEMPTS_FOLDER = "attempts"
LINEAGE_FOLDER = "lineage"
MARKS_FOLDER = "marks"
PROBE_FOLDER = "probe"
STORED_SUFFIX = ".stored.json"
PIN_MARK = "pin"
TOMBSTONE_MARK = "tombstone"

_STEP_DIGITS, _ATTEMPT_DIGITS = 18, 12
STEP_MAX = 10**_STEP_DIGITS - 1
ATTEMPT_MAX = 10**_ATTEMPT_DIGITS - 1

_STEP = re.compile(rf"step-([0-9]{{8,{_STEP_DIGITS}}})-a([0-9]{{4,{_ATTEMPT_DIGITS}}})\Z")
_START = re.compile(
    rf"a([0-9]{{4,{_ATTEMPT_DIGITS}}})-([0-9a-f]{{32}})-([0-9]{{1,15}})"
    rf"-(?:anew|step-([0-9]{{8,{_STEP_DIGITS}}})-a([0-9]{{4,{_ATTEMPT_DIGITS}}}))\.json\Z"
)
_ATTEMPT = re.compile(rf"a([0-9]{{4,{_ATTEMPT_DIGITS}}})\.json\Z")
_SHARD = re.compile(
    r"rank-([0-9]{5,9})-of-([0-9]{5,9})(\.safetensors(?:\.zst|\.tfz)?|\.json|\.stored\.json)\Z"
)
_IMAGE_SUFFIXES = {
    Codec.NONE: ".safetensors",
    Codec.ZSTD: ".safetensors.zst",
    Codec.PLANES: ".safetensors.tfz",
}
_MARK = re.compile(
    r"(pin|unpin|tombstone|damaged-[0-9a-f]{32}|tag-[A-Za-z0-9._-]+|untag-[A-Za-z0-9._-]+|"
    rf"restore-a[0-9]{{4,{_ATTEMPT_DIGITS}}}-[0-9]+)\Z"
)
_DAMAGE_MARK = re.compile(r"damaged-[0-9a-f]{32}\Z")


def check_name(name: str, *, what: str) -> str:
    """Return a run, tier or tag name unchanged, or raise ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"{what}: {name!r} is not a name; expected text")
    if len(name) > 200 or not NAME_PATTERN.match(name):
        raise ConfigError(
            f"{what}: {name!r} is not a usable name; expected up to 200 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


def attempt_key(run: str, number: int) -> str:
    return f"{run}/{ATTEMPTS_FOLDER}/a{number:04d}.json"


def parse_attempt(name: str) -> int | None:
    """Read an attempt number from the last part of a key."""
    match = _ATTEMPT.match(name)
    return int(match[1]) if match else None


def start_name(
    number: int, attempt_id: str, *, began_ms: int, started_from: CheckpointId | None
) -> str:
    """Name the record of how an attempt that saved something began."""
    start = "anew" if started_from is None else step_folder(started_from)
    return f"a{number:04d}-{attempt_id}-{began_ms}-{start}.json"


def parse_start(name: str) -> tuple[int, str, int, CheckpointId | None] | None:
    """Read what ``start_name`` was given."""
    match = _START.match(name)
    if match is None:
        return None
    number, attempt_id, began_ms, step, attempt = match.groups()
    started_from = None if step is None else CheckpointId(int(step), int(attempt))
    return int(number), attempt_id, int(began_ms), started_from


def step_folder(checkpoint: CheckpointId) -> str:
    return f"step-{checkpoint.step:08d}-a{checkpoint.attempt:04d}"


def parse_step_folder(name: str) -> CheckpointId | None:
    match = _STEP.match(name)
    return CheckpointId(int(match[1]), int(match[2])) if match else None


def step_prefix(run: str, checkpoint: CheckpointId) -> str:
    return f"{run}/{step_folder(checkpoint)}/"


def shard_name(shard: Shard, codec: Codec = Codec.NONE) -> str:
    """Name an image as it is stored: raw, or packed by a codec."""
    return _rank(shard) + _IMAGE_SUFFIXES[codec]


def is_packed_image(name: str) -> bool:
    """Say whether a name is that of an image that a codec has packed."""
    packed = tuple(suffix for codec, suffix in _IMAGE_SUFFIXES.items() if codec is not Codec.NONE)
    return parse_shard(name) is not None and name.endswith(packed)


def manifest_name(shard: Shard) -> str:
    return _rank(shard) + ".json"


def stored_name(shard: Shard) -> str:
    """Name the record of how a packed image lies in its file."""
    return _rank(shard) + STORED_SUFFIX


def _rank(shard: Shard) -> str:
    return f"rank-{shard.rank:05d}-of-{shard.world_size:05d}"


def parse_shard(name: str) -> Shard | None:
    """Read rank and world size from the name of an image, raw or packed, or of a record beside it."""
    match = _SHARD.match(name)
    return Shard(int(match[1]), int(match[2])) if match else None


def is_damage_mark(name: str) -> bool:
    """Say whether a mark is no person's, but a reader's that found the copy damaged (``commit_files.damage_mark``)."""
    return _DAMAGE_MARK.match(name) is not None


def tag_mark(tag: str) -> str:
    return f"tag-{tag}"


def is_ours(name: str) -> bool:
    """Say whether tierfall writes a file of this name, relative to a step folder."""
    folder, slash, leaf = name.rpartition("/")
    if folder == MARKS_FOLDER:
        return bool(_MARK.match(leaf))
    return slash == "" and (leaf in (COMMIT_NAME, INDEX_NAME) or _SHARD.match(leaf) is not None)


def belongs_to(name: str, shard: Shard) -> bool:
    """Say whether a file of a step folder is one that this rank writes there before the commit record: the index of all
    ranks is rank 0's."""
    return parse_shard(name) == shard or (name == INDEX_NAME and shard.rank == 0)


def tags_of(given: Iterable[str], marks: Iterable[str]) -> frozenset[str]:
    """Name the tags of a checkpoint: those ``given`` at its save and marked since, less those that were taken away."""
    added = {mark.removeprefix("tag-") for mark in marks if mark.startswith("tag-")}
    taken = {mark.removeprefix("untag-") for mark in marks if mark.startswith("untag-")}
    return frozenset({*given, *added} - taken)
