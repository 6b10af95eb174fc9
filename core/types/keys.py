"""The keys of everything on a tier, as pure functions between values and names.

    <run>/attempts/a0007.json
    <run>/lineage/a0007-<attempt id>-<milliseconds>-step-00000300-a0006.json, or -anew.json
    <run>/step-00000400-a0007/rank-00000-of-00004.safetensors, .json, commit.json
    <run>/step-00000400-a0007/rank-00000-of-00004.safetensors.zst or .safetensors.tfz, .stored.json: a packed image
    <run>/decided/000001-pin-step-00000400-a0007-<16 of the attempt id>[-<tag>]
    <run>/latest
    <run>/tier.json: which tier this is

Numbers are padded to at least these widths and compared as integers. A name that does not parse belongs to another
program and is never touched.
"""

from __future__ import annotations

import re

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.values import CheckpointId, Codec, Shard

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
COMMIT_NAME = "commit.json"
LATEST_NAME = "latest"
TIER_NAME = "tier.json"
ATTEMPTS_FOLDER = "attempts"
LINEAGE_FOLDER = "lineage"
DECIDED_FOLDER = "decided"
PROBE_FOLDER = "probe"
TAG_CHARACTERS_MAX = 128
STORED_SUFFIX = ".stored.json"
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
_DECIDED = re.compile(
    rf"([0-9]{{6,12}})-([a-z]+)-(step-[0-9]{{8,{_STEP_DIGITS}}}-a[0-9]{{4,{_ATTEMPT_DIGITS}}})-([0-9a-f]{{16}})"
    r"(?:-([A-Za-z0-9][A-Za-z0-9._-]*))?\Z"
)


def check_name(name: str, *, what: str, most: int = 200) -> str:
    """Return a run, tier or tag name unchanged, or raise ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"{what}: {name!r} is not a name; expected text")
    if len(name) > most or not NAME_PATTERN.match(name):
        raise ConfigError(
            f"{what}: {name!r} is not a usable name; expected at most {most} letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


def check_tag(tag: str, *, what: str) -> str:
    """Return the tag of a command unchanged, or raise ConfigError: it becomes part of the name of a file."""
    return check_name(tag, what=what, most=TAG_CHARACTERS_MAX)


def attempt_key(run: str, number: int) -> str:
    return f"{run}/{ATTEMPTS_FOLDER}/a{number:04d}.json"


def parse_attempt(name: str) -> int | None:
    """Parse the last component of an attempt's key."""
    match = _ATTEMPT.match(name)
    return int(match[1]) if match else None


def start_name(start: AttemptStart) -> str:
    """Name the record of an attempt's start, with all that is known of it: when it began, to the millisecond, and from
    which checkpoint."""
    origin = "anew" if start.started_from is None else step_folder(start.started_from)
    return f"a{start.attempt:04d}-{start.attempt_id}-{round(start.began_s * 1000)}-{origin}.json"


def parse_start(name: str) -> AttemptStart | None:
    """Parse a ``start_name``."""
    match = _START.match(name)
    if match is None:
        return None
    number, attempt_id, began_ms, step, attempt = match.groups()
    return AttemptStart(
        attempt=int(number),
        attempt_id=attempt_id,
        started_from=None if step is None else CheckpointId(int(step), int(attempt)),
        began_s=int(began_ms) / 1000,
    )


def step_folder(checkpoint: CheckpointId) -> str:
    return f"step-{checkpoint.step:08d}-a{checkpoint.attempt:04d}"


def parse_step_folder(name: str) -> CheckpointId | None:
    match = _STEP.match(name)
    return CheckpointId(int(match[1]), int(match[2])) if match else None


def step_prefix(run: str, checkpoint: CheckpointId) -> str:
    return f"{run}/{step_folder(checkpoint)}/"


def shard_name(shard: Shard, codec: Codec = Codec.NONE) -> str:
    """Name a stored image: raw, or packed by a codec."""
    return _shard_prefix(shard) + _IMAGE_SUFFIXES[codec]


def is_packed_image(name: str) -> bool:
    packed = tuple(suffix for codec, suffix in _IMAGE_SUFFIXES.items() if codec is not Codec.NONE)
    return parse_shard(name) is not None and name.endswith(packed)


def manifest_name(shard: Shard) -> str:
    return _shard_prefix(shard) + ".json"


def stored_name(shard: Shard) -> str:
    """Name the record of a packed image's frames."""
    return _shard_prefix(shard) + STORED_SUFFIX


def _shard_prefix(shard: Shard) -> str:
    return f"rank-{shard.rank:05d}-of-{shard.world_size:05d}"


def parse_shard(name: str) -> Shard | None:
    """Parse rank and world size from the name of an image, raw or packed, or of a document beside it."""
    match = _SHARD.match(name)
    return Shard(int(match[1]), int(match[2])) if match else None


def decided_name(
    number: int, word: str, checkpoint: CheckpointId, attempt_id: str, tag: str = ""
) -> str:
    """Name an entry of what is decided; ``attempt_id``: 16 hexadecimal digits."""
    named = f"{number:06d}-{word}-{step_folder(checkpoint)}-{attempt_id}"
    return f"{named}-{tag}" if tag else named


def parse_decided(name: str) -> tuple[int, str, CheckpointId, str, str] | None:
    """Parse a ``decided_name`` into number, word, checkpoint, attempt id and tag ('': none)."""
    match = _DECIDED.match(name)
    checkpoint = match and parse_step_folder(match[3])
    if match is None or checkpoint is None:
        return None
    return int(match[1]), match[2], checkpoint, match[4], match[5] or ""


def is_tierfall_name(name: str) -> bool:
    """Whether tierfall writes a file of this name, relative to a step folder."""
    return name == COMMIT_NAME or _SHARD.match(name) is not None


def is_run_file(name: str) -> bool:
    """Whether tierfall writes a file of this name, relative to the folder of a run."""
    folder, _, rest = name.partition("/")
    if folder == ATTEMPTS_FOLDER:
        return parse_attempt(rest) is not None
    if folder == LINEAGE_FOLDER:
        return parse_start(rest) is not None
    if folder == DECIDED_FOLDER:
        return parse_decided(rest) is not None
    if parse_step_folder(folder) is not None:
        return is_tierfall_name(rest)
    return folder == PROBE_FOLDER or name in (LATEST_NAME, TIER_NAME)
