"""From errno to the error tree, in one place for the POSIX backend.

The table decides what a caller may do: a retryable error says that nothing is known, KeyNotFoundError that the file
system answered. ENOENT is not in it: only the caller knows whether the folder that answered is still the tier.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyInvalidError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_PASS = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOMEDIUM,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)

_TABLE: dict[int, tuple[type[BackendError], str]] = {
    errno.EEXIST: (KeyExistsError, "the key is taken"),
    errno.ENAMETOOLONG: (KeyInvalidError, "this file system takes no name of that length"),
    errno.ELOOP: (AccessDeniedError, "symbolic links are not followed below the tier's folder"),
    **dict.fromkeys(_FULL, (StorageFullError, "free space there, or raise the quota")),
    **dict.fromkeys(_DENIED, (AccessDeniedError, "check owner, mode and mount options")),
    **dict.fromkeys(
        _MAY_PASS, (UnreachableError, "nothing is known about what is stored; try again")
    ),
}


def backend_error(error: OSError, what: str) -> BackendError:
    """Make the error that stands for an OSError; ``what`` names operation, key and place."""
    kind, hint = _TABLE.get(error.errno or 0, (BackendError, "see the chained error"))
    return kind(f"{what}: {error.strerror or error}; {hint}")


def sync_error(error: OSError, what: str, state: str) -> BackendError:
    """Make the error for a failed fsync or close; ``state`` says what is left.

    Never retryable: the kernel may have dropped the bytes and forgotten it, and a second fsync would then lie.
    """
    kind = StorageFullError if error.errno in _FULL else LostWriteError
    return kind(f"{what}: {error.strerror or error}; {state}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise every OSError of the block as a BackendError; a BackendError passes as it is."""
    try:
        yield
    except BackendError:
        raise
    except OSError as error:
        raise backend_error(error, what) from error
