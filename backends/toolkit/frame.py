"""What all writers share: leaving the ``with`` without publish aborts, and aborting twice is no error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class AbortsOnLeave(ABC):
    """The ``with`` of a writer; ``abort`` does nothing once it is published."""

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()
