"""What the tests of the contract share: small states, a run's folders, the command line, programs and ranks.

A program or a command is a fork of a process that has imported torch and tierfall already (``tests/forked.py``): it
starts within 50 ms.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import re
import select
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import tierfall
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
FAULTY = Path(__file__).with_name("faulty.py")
ELEMENTS = 20_000
IMAGE = "rank-00000-of-00001.safetensors"
MANIFEST = "rank-00000-of-00001.json"


# States ----------------------------------------------------------------------------------------------


def state_of(step: int, *, elements: int = ELEMENTS) -> dict[str, Any]:
    """About 80 KiB that hold the step's number everywhere."""
    return {"w": torch.full((elements,), float(step)), "extra": {"step": step}}


def blank(*, elements: int = ELEMENTS) -> dict[str, Any]:
    return state_of(-1, elements=elements)


def step_in(state: Mapping[str, Any]) -> int:
    """Return the step that a state of ``state_of`` is of, all of it."""
    step = state["extra"]["step"]
    assert torch.equal(state["w"], torch.full_like(state["w"], float(step))), state
    assert isinstance(step, int)
    return step


def save_steps(ckpt: tierfall.Checkpointer, *steps: int, **words: Any) -> None:
    """Save these steps, each through to the last tier before the next."""
    for step in steps:
        ckpt.save(step, state_of(step), block=True, **words)


def restored(
    ckpt: tierfall.Checkpointer, *, elements: int = ELEMENTS, **how: Any
) -> tierfall.RestoreReport:
    """Restore into a blank state, and compare its values with the step that the report has."""
    state = blank(elements=elements)
    report = ckpt.restore(state, **how)
    assert report is not None, "there is no checkpoint"
    assert step_in(state) == report.step
    return report


def training_state(seed: int = 0) -> dict[str, Any]:
    """A model, its optimizer after one step, and a plain value: about 100 KiB."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    train_a_step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "extra": {"epoch": seed}}


def train_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 32)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(a: Any, b: Any) -> bool:
    """Whether two nested values are the same bit for bit: dtype, shape and stride of tensors, the order of keys and the
    sign of zero included."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            and a.detach()
            .cpu()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(b.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Generator):
        return equal(a.get_state(), b.get_state())
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, Mapping):
        return equal(list(a), list(b)) and all(map(equal, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


# The log ---------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """What tierfall has logged: its threads log a moment later, so that a test waits for what it expects."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self, pattern: str = "", level: int = logging.WARNING) -> list[str]:
        """The messages of at least this level in which the pattern is found."""
        found = [r.getMessage() for r in list(self.records) if r.levelno >= level]
        return [line for line in found if re.search(pattern, line, re.DOTALL)]

    def wait(self, pattern: str, level: int = logging.WARNING) -> str:
        """The first such message, which may still come."""
        wait_until(lambda: bool(self.lines(pattern, level)), f"a message with {pattern!r}", 20)
        return self.lines(pattern, level)[0]


# One run's folders -----------------------------------------------------------------------------------


class Answer:
    """What a command or a program wrote, and its exit code; negative: the signal that ended it."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def document(self) -> dict[str, Any]:
        """stdout as the one JSON document that it must be."""
        found = json.loads(self.out, parse_constant=_no_constant)
        assert isinstance(found, dict)
        return found


def _no_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


class Place:
    """The folders of one run: ``root`` with a folder for each file tier and ``tiers.yaml``, and ``memory``."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.root = root
        self.memory = memory
        self.yaml = root / "tiers.yaml"

    def config(self, **words: Any) -> dict[str, Any]:
        """Return and write to ``tiers.yaml`` a chain of host memory and folders.

        A keyword that is a dict is a file tier of that name with these settings (with ``kind`` another kind of tier;
        ``host``: the settings of memory; ``host=None``: no memory); anything else is a setting of the run. Without any
        tier there is one folder, ``disk``.

        >>> place.config(disk={}, pfs={"flush": {"every": 2}}, max_wait="1s")
        """
        has_host = words.get("host", {}) is not None
        host = {"folder": str(self.memory), "capacity": "4MiB", **(words.pop("host", None) or {})}
        tiers = {name: value for name, value in words.items() if isinstance(value, dict)}
        tiers = {name: value for name, value in tiers.items() if name not in SECTIONS}
        config = {
            "run": "run",
            "chunk": "64KiB",
            "max_wait": "30s",
            **({"plugins": [str(FAULTY)]} if "faulty://" in str(tiers) else {}),
            **{name: value for name, value in words.items() if name not in tiers},
            "tiers": [
                *([{"name": "host", "kind": "host", **host}] if has_host else []),
                *(self._tier(name, settings) for name, settings in (tiers or {"disk": {}}).items()),
            ],
        }
        self.write(config)
        return config

    def _tier(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        if settings.get("kind", "file") != "file":
            return {"name": name, **settings}
        return {"name": name, "kind": "file", "path": str(self.root / name), **settings}

    def write(self, config: Mapping[str, Any]) -> Path:
        """Write ``tiers.yaml``: JSON is YAML."""
        self.yaml.write_text(json.dumps(config))
        return self.yaml

    def open(self, **words: Any) -> tierfall.Checkpointer:
        """Open the run that ``tiers.yaml`` declares; the words are those of ``tierfall.open``."""
        return tierfall.open(self.yaml, **words)

    def save(self, *steps: int, **words: Any) -> None:
        """Save these steps in one start, each through to the last tier before the next."""
        with self.open() as ckpt:
            save_steps(ckpt, *steps, **words)

    def restored(self, **how: Any) -> tierfall.RestoreReport:
        """Restore in a start of its own."""
        with self.open() as ckpt:
            return restored(ckpt, **how)

    def cli(
        self, *words: str, code: int = 0, input: str | None = None, **environment: str
    ) -> Answer:
        """Run ``tierfall`` on ``tiers.yaml``, and compare its exit code; ``code`` -1 takes any."""
        command, *rest = words
        answer = tierfall_command(
            command, "--config", str(self.yaml), *rest, cwd=self.root, input=input, **environment
        )
        assert code in (-1, answer.code), f"{words}: {answer.code}\n{answer.out}\n{answer.err}"
        return answer

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self.cli(*words, "--json", code=code).document

    def ls(self) -> dict[str, dict[str, str]]:
        """``ls --json``: the state of every copy, by step and tier. ``{"2@1": {"disk": "committed"}}``."""
        found = self.cli("ls", "--json", code=-1).document["checkpoints"]
        return {
            f"{c['step']}@{c['attempt']}": {t: copy["state"] for t, copy in c["copies"].items()}
            for c in found
        }

    def steps(self, tier: str = "disk") -> list[int]:
        """The steps that a file tier has committed, each of them read back and compared."""
        found = []
        for folder in self.folders(tier):
            step = step_in(tierfall.load(folder))
            assert folder.name.startswith(f"step-{step:08d}-")
            found.append(step)
        return found

    def folders(self, tier: str = "disk") -> list[Path]:
        """The step folders of a file tier that have a commit record, in order."""
        return sorted(path.parent for path in (self.root / tier / "run").glob("step-*/commit.json"))

    def start(self, code: str, *arguments: str, **environment: str) -> Program:
        """Start a Python program in ``root``, whose ``tiers.yaml`` it finds; ``state_of`` and its like are imported."""
        return Program(code, arguments, self.root, environment)

    def begin(self, *words: str) -> Program:
        """Start ``tierfall`` on ``tiers.yaml``, and leave it running."""
        command, *rest = words
        return Program(None, [command, "--config", str(self.yaml), *rest], self.root, {})

    def start_with_a_step_in_memory(self) -> Program:
        """Start a program that has saved step 1, and sleeps."""
        program = self.start(
            """
            ckpt = tierfall.open("tiers.yaml")
            ckpt.save(1, state_of(1)).captured()
            print("sealed")
            time.sleep(60)
            """
        )
        assert program.line() == "sealed", program.errors()
        return program

    def run(self, code: str, *arguments: str, **environment: str) -> Answer:
        """Run a Python program in ``root`` to its end."""
        return self.start(code, *arguments, **environment).end()


@contextmanager
def new_place(root: Path) -> Iterator[Place]:
    """The folders of a run; its memory is below ``/dev/shm`` if there is one, and goes afterwards."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="tierfall-test-", dir=shared if shared.is_dir() else root
    ) as memory:
        yield Place(root, Path(memory))


SECTIONS = ("capture", "interval", "retain", "metrics", "drain", "events", "bandwidth", "compress")
"""Settings of a run that are mappings: not tiers."""


def tierfall_command(
    *words: str, cwd: Path | None = None, input: str | None = None, **environment: str
) -> Answer:
    """Run ``python -m tierfall`` with these words."""
    program = Program(None, words, cwd or ROOT, {"TIERFALL_CONFIG": "", **environment})
    return program.end(input=input)


class Program:
    """A process, with a pipe to its standard input; ``code`` None: the command line of tierfall."""

    def __init__(
        self, code: str | None, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> None:
        command = ["-m", "tierfall"]
        if code is not None:
            command = ["-m", "tests.contract.program", PRELUDE + textwrap.dedent(code)]
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115 - ``end`` closes it
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._process = forked.Forked(
            forked.server_of(),
            [*command, *arguments],
            environment,
            self._err,
            has_stdin=True,
            cwd=cwd,
        )
        self.pid = self._process.pid

    def line(self, timeout_s: float = 30.0) -> str:
        """The next line that it prints, without its end; "" once it has closed its output."""
        deadline, found = time.monotonic() + timeout_s, b""
        while not found.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            assert ready, f"no line in {timeout_s} s; stderr:\n{self.errors()}"
            if not (byte := self._process.stdout.read(1)):
                break
            found += byte
        return found.decode().rstrip("\n")

    def tell(self, text: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)
        self._process.close()
        self._err.close()

    def errors(self) -> str:
        """What it has written to stderr so far."""
        return Path(f"/proc/self/fd/{self._err.fileno()}").read_text()

    def end(self, input: str | None = None, timeout_s: float = 60.0) -> Answer:
        """Wait until it has ended by itself. What ``line`` returned is not in ``out``."""
        if input is not None:
            assert self._process.stdin is not None
            self._process.stdin.write(input)
        try:
            out, _ = self._process.communicate(timeout_s)
        except BaseException:
            self._process.kill()
            raise
        answer = Answer(self._process.wait(), out, self.errors())
        self._err.close()
        return answer


PRELUDE = """
import os, sys, time
sys.stdout.reconfigure(line_buffering=True)
import torch
import tierfall
from tests.contract.kit import *
"""
"""How each program of a test begins."""


# Media -----------------------------------------------------------------------------------------------


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name; without what a trainer deletes meanwhile."""
    found = {}
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            with suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def folder_of(place: Place, step: int, tier: str = "disk", attempt: int = 1) -> Path:
    """The folder of a checkpoint."""
    return place.root / tier / "run" / f"step-{step:08d}-a{attempt:04d}"


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file, as a bad medium does; an offset below 0 counts from its end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class Modes:
    """While it is entered, file modes count for this thread and for those that it starts, though it may be root's."""

    def __enter__(self) -> None:
        self._before = _capabilities()
        _set_capabilities(self._before & ~_IGNORE_MODES)

    def __exit__(self, *raised: object) -> None:
        _set_capabilities(self._before)


_IGNORE_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_VERSION_3 = 0x20080522


def _capabilities() -> int:
    found = (ctypes.c_uint32 * 6)()
    _capability_call("capget", found)
    return found[0]


def _set_capabilities(effective: int) -> None:
    found = (ctypes.c_uint32 * 6)()
    _capability_call("capget", found)
    found[0] = effective
    _capability_call("capset", found)


def _capability_call(name: str, data: Any) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    if getattr(ctypes.CDLL(None, use_errno=True), name)(header, data):
        raise OSError(ctypes.get_errno(), name)


# Ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """What a function raised on a rank: the name of its class and its text."""

    kind: str
    text: str


class Crew:
    """The ranks of a job, each a process that runs functions of the tests one after another, as under torchrun.

    ``nodes`` says for each rank on which node it is; by default all are on one. It may change between two calls: with
    several nodes, each start searches for a while what they share.

    >>> def saves(rank: int, config: dict[str, Any]) -> int: ...   # at the top level of a test's module
    >>> crew.run(saves, config=config)
    [0, 1, 2, 3]
    """

    def __init__(self, folder: Path, world_size: int, nodes: Sequence[int] = ()) -> None:
        self.world_size = world_size
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.nodes = list(nodes) or [0] * world_size
        self._logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
        self._ranks = [self._start(rank) for rank in range(world_size)]

    def _start(self, rank: int) -> forked.Forked:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of 127.0.0.1, which nobody may know
            "PYTHONPATH": str(ROOT),
        }
        with self._logs[rank].open("a") as log:
            return forked.Forked(
                forked.server_of(rank), ["-c", _RANK], environment, log, has_stdin=True, cwd=ROOT
            )

    def run(
        self, function: Callable[..., Any], timeout_s: float = 60.0, **arguments: Any
    ) -> list[Any]:
        """Call a function with its rank and these arguments on all ranks; return what each returned (JSON)."""
        found = self.outcomes(function, timeout_s, **arguments)
        assert not any(isinstance(one, Raised) for one in found), f"{found}\n{self.logs()}"
        return found

    def outcomes(
        self, function: Callable[..., Any], timeout_s: float = 60.0, **arguments: Any
    ) -> list[Any]:
        """Like ``run``, with ``Raised`` for each rank whose call raised."""
        for rank in range(self.world_size):
            self.tell(rank, function, **arguments)
        return [self.answer(rank, timeout_s) for rank in range(self.world_size)]

    def tell(self, rank: int, function: Callable[..., Any], **arguments: Any) -> None:
        """Begin a call on one rank."""
        pipe = self._ranks[rank].stdin
        assert pipe is not None
        node = self.nodes[rank]
        placed = {"GROUP_RANK": str(node), "LOCAL_RANK": str(self.nodes[:rank].count(node))}
        request = {
            "module": function.__module__,
            "name": function.__name__,
            "arguments": arguments,
            "environment": placed,
        }
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()

    def answer(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Wait for the end of a rank's call."""
        ready, _, _ = select.select([self._ranks[rank].stdout], [], [], timeout_s)
        assert ready, f"rank {rank} hangs\n{self.logs()}"
        line = self._ranks[rank].stdout.readline()
        assert line, f"rank {rank} has ended\n{self.logs()}"
        answer = json.loads(line)
        return Raised(**answer["raised"]) if "raised" in answer else answer["value"]

    def signal(self, rank: int, number: int) -> None:
        self._ranks[rank].send_signal(number)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self._logs)

    def close(self) -> None:
        """SIGKILL all ranks."""
        for process in self._ranks:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(30)
            process.close()


_RANK = """
import importlib, json, os, sys, traceback
answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
os.dup2(2, 1)
rank = int(os.environ["RANK"])
import torch.distributed as dist
dist.init_process_group("gloo")
for line in sys.stdin:
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    try:
        function = getattr(importlib.import_module(asked["module"]), asked["name"])
        answer = {"value": function(rank, **asked["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        answer = {"raised": {"kind": type(error).__name__, "text": str(error)}}
    print(json.dumps(answer), file=answers, flush=True)
"""


@contextmanager
def crew(folder: Path, world_size: int, nodes: Sequence[int] = ()) -> Iterator[Crew]:
    """Ranks for one block."""
    made = Crew(folder, world_size, nodes)
    try:
        yield made
    finally:
        made.close()


# Waiting ---------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for what another thread or process brings about."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"after {timeout_s} s still not: {what}"
        time.sleep(min(max(0.005, waited / 10), 0.05))
