"""A filesystem of fsspec's that behaves as those over object stores do, of which none is here."""

from __future__ import annotations

import io
import threading
from typing import Any, ClassVar

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]


class Store(AbstractFileSystem):  # type: ignore[misc]
    """Behaves as gcsfs and adlfs do: buckets, no folders, whole puts, and conditions on them."""

    protocol = ("gs", "gcs")
    lock = threading.Lock()
    objects: ClassVar[dict[str, bytes]] = {}
    buckets: ClassVar[set[str]] = set()

    def ls(self, path: str, detail: bool = True, **words: Any) -> Any:
        path = self._strip_protocol(path)
        self._check(path)
        found = [name for name in self.objects if name.startswith(f"{path}/")]
        if not found and "/" in path:
            raise FileNotFoundError(path)
        return [{"name": name, "type": "file", "size": 0} for name in found]

    def find(self, path: str, detail: bool = False, **words: Any) -> Any:
        """List nothing where the bucket is not there, as the worst of them do."""
        entries = dict(self.objects)
        return {
            name: {"name": name, "type": "file", "size": len(data)}
            for name, data in entries.items()
            if name == path or name.startswith(f"{path}/")
        }

    def info(self, path: str, **words: Any) -> Any:
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "type": "file", "size": len(self.objects[path])}
        if any(name.startswith(f"{path}/") for name in dict(self.objects)):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: int = 0, end: int = 0, **words: Any) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **words: Any) -> None:
        self._check(path)
        with self.lock:
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = value

    def _open(self, path: str, mode: str = "rb", **words: Any) -> Any:
        store = self

        class File(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    store.objects[path] = self.getvalue()
                super().close()

        return File()

    def cp_file(self, path1: str, path2: str, **words: Any) -> None:
        self.objects[path2] = self.objects[path1]

    def rm_file(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def _check(self, path: str) -> None:
        if path.partition("/")[0] not in self.buckets:
            raise FileNotFoundError(path)
