"""A backend of the tests, and the only place that knows how one is written: ``faulty:///FOLDER``.

Each object is a file below the folder. A test, or another process, sets a fault by a file beside the folder, which
contains a part of the keys that it is about:

========  ===================================================================================
refuse    storing is refused
full      there is no room to store anything
deny      reading is not allowed
absent    reading is answered by "there is no such object"
away      every call: the store does not answer
hang      every call waits until the fault is gone
lose      what is stored is accepted, and is not there
hide      listings leave it out
========  ===================================================================================
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tierfall.backends import toolkit

FAULTS = {
    "refuse": toolkit.BackendError,
    "full": toolkit.StorageFullError,
    "deny": toolkit.AccessDeniedError,
    "away": toolkit.UnreachableError,
}


class Faulty:
    """What a test does to the folder of such a tier."""

    def __init__(self, root: Path, name: str = "store") -> None:
        self.folder = root / name
        self.faults = root / f"{name}.faults"
        self.faults.mkdir()

    def tier(self, **settings: Any) -> dict[str, Any]:
        """The settings of the tier, for ``Place.config``."""
        return {"kind": "object", "url": f"faulty://{self.folder}", **settings}

    def set(self, fault: str, part: str = "", call: str = "") -> None:
        """Set a fault of all keys that have this part; of one call alone: ``get``, ``put``, ``delete`` or ``list``."""
        self._struck(fault).unlink(missing_ok=True)
        new = self.faults / f".{fault}"
        new.write_text(f"{call} {part}")
        new.rename(self.faults / fault)

    def heal(self) -> None:
        for file in self.faults.iterdir():
            file.unlink()

    def struck(self, fault: str) -> bool:
        """Whether a call has met the fault since it was set."""
        return self._struck(fault).exists()

    def _struck(self, fault: str) -> Path:
        return self.faults.with_name(f"{self.faults.name}.{fault}")

    def steps(self) -> list[int]:
        """The steps that have a commit record."""
        return sorted(int(p.parent.name[5:13]) for p in self.folder.glob("run/step-*/commit.json"))


@toolkit.register("faulty")
class Store(toolkit.ObjectStore):
    durable = conditional_create = True

    def __init__(self, url: str, *, options: Mapping[str, Any], read_only: bool) -> None:
        self.folder = Path(url.removeprefix("faulty://"))
        self.faults = self.folder.with_name(f"{self.folder.name}.faults")

    def fault(self, name: str, call: str, key: str) -> bool:
        try:
            of, _, part = (self.faults / name).read_text().partition(" ")
        except FileNotFoundError:
            return False
        if of not in ("", call) or part not in key:
            return False
        self.faults.with_name(f"{self.faults.name}.{name}").touch()
        return True

    def meet(self, call: str, key: str, *faults: str) -> None:
        while self.fault("hang", call, key):
            time.sleep(0.005)
        for name in ("away", *faults):
            if self.fault(name, call, key):
                raise FAULTS[name](f"{key}: {name}")

    def get(self, key: str, start: int, end: int) -> tuple[bytes, int] | None:
        self.meet("get", key, "deny")
        if self.fault("absent", "get", key):
            return None
        try:
            data = (self.folder / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data[start:end], len(data)

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        self.meet("put", key, "refuse", "full")
        if self.fault("lose", "put", key):
            return True
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = self.folder.with_name(f"{self.folder.name}-{os.getpid()}-{threading.get_ident()}")
        new.write_bytes(data)
        if not if_absent:
            new.rename(path)
            return True
        try:
            path.hardlink_to(new)
        except FileExistsError:
            return False
        finally:
            new.unlink()
        return True

    def delete(self, key: str) -> None:
        self.meet("delete", key)
        (self.folder / key).unlink(missing_ok=True)

    def list(self, prefix: str, delimiter: str) -> Iterable[toolkit.StoredObject]:
        self.meet("list", prefix)
        return [
            toolkit.StoredObject(key=key, bytes=path.stat().st_size)
            for path in (self.folder / prefix).rglob("*")
            if path.is_file()
            and not self.fault("hide", "list", key := str(path.relative_to(self.folder)))
        ]
