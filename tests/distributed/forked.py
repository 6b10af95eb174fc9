"""Processes of a job's ranks that begin with torch imported: forks of a process that has done nothing else yet.

A process of its own is what a rank needs; importing torch anew, for two seconds each, is not. There are several servers
to fork from, since the children of one iterate over sets of text in one order, as real ranks do not.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import subprocess
import sys
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
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]
_servers: dict[int, Server] = {}


class Server:
    """Forks on request. It ends with the process that started it."""

    def __init__(self, hash_seed: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**environment, "PYTHONHASHSEED": str(hash_seed)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def ask(self, request: Any, *handles: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], handles)
        return json.loads(self._socket.recv(4096))


def server_of(rank: int) -> Server:
    """The server that a rank is forked from."""
    number = rank % SERVERS
    if number not in _servers:
        _servers[number] = Server(number + 1)
    return _servers[number]


class Forked:
    """A process as ``subprocess.Popen`` has it, with its standard output in a pipe."""

    def __init__(
        self, server: Server, command: Sequence[str], env: Mapping[str, str], stderr: IO[str]
    ) -> None:
        self._server = server
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self.pid: int = server.ask([*command, dict(env)], writing, stderr.fileno())
        os.close(writing)
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

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return all that it has printed, once it has ended."""
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(ours: socket.socket) -> list[str]:
    """Answer requests; return in a child, with its arguments."""
    while True:
        data, handles, _, _ = socket.recv_fds(ours, 1 << 20, 2)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            ours.send(json.dumps(answer).encode())
            continue
        *command, environment = request
        pid = os.fork()
        if not pid:
            ours.close()
            for number, handle in enumerate(handles, 1):
                os.dup2(handle, number)
                os.close(handle)
            os.environ.clear()
            os.environ.update(environment)
            return list(command)
        for handle in handles:
            os.close(handle)
        ours.send(json.dumps(pid).encode())


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a child whose collector walked all of that would copy it
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: none of them would be there in a child"
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    importlib.import_module("numpy.random").seed()  # all children would begin with the same
    runpy.run_path(sys.argv[0], run_name="__main__")
