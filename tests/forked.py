"""Python processes that begin with torch and tierfall imported: forks of a process that has done nothing else yet.

A process of its own is what a rank or a trainer needs; importing torch anew, for two seconds each, is not. There are
several servers to fork from, since the children of one iterate over sets of text in one order, as real ranks do not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SERVERS = 2
IMPORTED = [
    "numpy.random",
    "tierfall.backends",
    "tierfall.run.checkpointer",
    "tierfall.integrations.dcp",
    "torch._dynamo",  # of the first optimizer
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]
MORE = "TIERFALL_TESTS_IMPORT"
"""The variable that names further modules, such as a training framework."""
_servers: dict[int, Server] = {}


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()


class Server:
    """Forks on request. It ends with the process that started it."""

    def __init__(self, hash_seed: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**environment, "PYTHONHASHSEED": str(hash_seed)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def ask(self, request: Any, *handles: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], handles)
        return json.loads(self._socket.recv(4096))


def server_of(rank: int = 0) -> Server:
    """The server that a rank is forked from; a process that is no rank is forked from the first one."""
    number = rank % SERVERS
    if number not in _servers:
        _servers[number] = Server(number + 1)
    return _servers[number]


class Forked:
    """A process as ``subprocess.Popen`` has it: with its standard output in a pipe, its standard input where asked for.

    ``command`` is what follows ``python``: a file, ``-m`` and a module, or ``-c`` and code, and the arguments. Without
    ``stderr``, its standard error goes to its standard output.
    """

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        env: Mapping[str, str],
        stderr: IO[str] | None,
        *,
        has_stdin: bool = False,
        cwd: Path | None = None,
    ) -> None:
        self._server = server
        self.returncode: int | None = None
        reading, writing = os.pipe()
        theirs = [writing, writing if stderr is None else stderr.fileno()]
        self.stdin: IO[str] | None = None
        if has_stdin:
            stdin, ours = os.pipe()
            theirs.append(stdin)
            self.stdin = os.fdopen(ours, "w")
        request = {"command": [*command], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        self.pid: int = server.ask(request, *theirs)
        for descriptor in (writing, *theirs[2:]):
            os.close(descriptor)
        self.stdout = os.fdopen(reading, "rb", buffering=0)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = 60.0) -> tuple[str, None]:
        """Close its standard input, and return all that it has printed once it has ended."""
        if self.stdin is not None:
            self.stdin.close()
        deadline = time.monotonic() + timeout
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
                data = self.stdout.read(1 << 16)
                if not data:
                    break
                found += data
        self.wait(max(0.1, deadline - time.monotonic()))
        self.stdout.close()
        return found.decode(), None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *exception: object) -> None:
        self.communicate()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes to a process that has ended."""
        self.stdout.close()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what was written last was never read
                self.stdin.close()


def start(command: Sequence[str]) -> Forked:
    """Start a process with a pipe to its standard input, and standard error as here."""
    assert sys.__stderr__ is not None
    return Forked(server_of(), command, os.environ, sys.__stderr__, has_stdin=True)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, as ``subprocess.run`` does with ``capture_output`` and ``text``."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = Forked(server_of(), command, os.environ if env is None else env, stderr, cwd=cwd)
        try:
            out, _ = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        stderr.seek(0)
        return subprocess.CompletedProcess(command, process.wait(), out, stderr.read())


def _serve(ours: socket.socket) -> list[str]:
    """Answer requests; return in a child, with its arguments."""
    while True:
        data, handles, _, _ = socket.recv_fds(ours, 1 << 20, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            ours.send(json.dumps(answer).encode())
            continue
        pid = os.fork()
        if not pid:
            ours.close()
            for number, handle in zip((1, 2, 0), handles, strict=False):
                os.dup2(handle, number)
                os.close(handle)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the old one knows another kind of file
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            return [str(word) for word in request["command"]]
        for handle in handles:
            os.close(handle)
        ours.send(json.dumps(pid).encode())


def _run() -> None:
    """Run what ``sys.argv`` names as Python would run it."""
    code: object = None
    try:
        if sys.argv[0] == "-m":
            _, module, *arguments = sys.argv
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            _, text, *arguments = sys.argv
            sys.argv = ["-c", *arguments]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        _end(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


def _commands() -> list[str]:
    """What commands import when they need it: all of tierfall but adapters of frameworks and its entry points."""
    package = importlib.import_module("tierfall")
    names = [each.name for each in pkgutil.walk_packages(package.__path__, "tierfall.")]
    left_out = ("tierfall.__main__", "tierfall.demo", "tierfall.integrations")
    return [name for name in names if not name.startswith(left_out)]


def _prepare_commands() -> None:
    """Make the parser of the command line once: to make it is half of what a command takes."""
    typer = importlib.import_module("typer.main")
    typer.get_command = functools.cache(typer.get_command)  # type: ignore[attr-defined]
    typer.get_command(importlib.import_module("tierfall.cli.app").app)


def _end(code: int) -> None:
    """End as an interpreter does, but for its taking down all modules, which were here before the command."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == "__main__":
    for name in [*IMPORTED, *os.environ.get(MORE, "").split(), *_commands()]:
        importlib.import_module(name)
    _prepare_commands()
    gc.freeze()  # a child whose collector walked all of that would copy it
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: none of them would be there in a child"
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    importlib.import_module("numpy.random").seed()  # all children would begin with the same
    _run()
