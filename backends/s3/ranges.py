"""Reading ranges over S3's own request, straight into the caller's memory: obstore hands out copies."""

from __future__ import annotations

from tierfall.backends.s3.connections import Lines, checked
from tierfall.backends.s3.signing import Sign
from tierfall.core.types.errors import BackendError


class Ranges:
    """The one request that reads, over ``lines`` to a bucket."""

    def __init__(self, lines: Lines, sign: Sign) -> None:
        self.lines = lines
        self.sign = sign

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        """Fill the view from ``offset``; return how many bytes there were, fewer where the object ends before."""
        answer = self.lines.send(
            "GET",
            self.sign("GET", self.lines.at(key), what),
            what,
            headers={"Range": f"bytes={offset}-{offset + view.nbytes - 1}"},
            into=view,
        )
        checked(answer, what)
        if answer.status == 200 and (offset or answer.more):
            raise BackendError(f"{what}: the store sent all of it where a range was asked for")
        if answer.more:
            raise BackendError(f"{what}: the store sent more than the range asked for")
        return answer.filled
