"""The conformance suite: every promise of ``core.types.backend`` as a check for any backend.

The checks are plain asserts and need no test framework. A backend's test makes an empty backend and runs all checks::

    @pytest.mark.parametrize("name", CHECKS)
    def test_promise(name, tmp_path_factory):
        check_promise(name, lambda: MyBackend(tmp_path_factory.mktemp("tier")), reopen=lambda backend: ...)

or, without a framework, ``check_backend(make, reopen=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import isfunction
from types import MappingProxyType

from tierfall.backends.conformance import checks
from tierfall.backends.conformance.kit import Bench
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError

__all__ = ["CHECKS", "Check", "check_backend", "check_promise"]

Check = Callable[[Bench], None]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        name: check
        for name, check in vars(checks).items()
        if isfunction(check) and check.__module__ == checks.__name__ and name[0] != "_"
    }
)


def check_promise(
    name: str,
    make: Callable[[], Backend],
    *,
    reopen: Callable[[Backend], Backend] | None = None,
    leaves_unfinished: bool = True,
) -> None:
    """Run one check of ``CHECKS``. Raises AssertionError, with the promise as a note, where the backend breaks it."""
    check = CHECKS[name]
    promise = f"the promise: {' '.join((check.__doc__ or name).split())}"
    try:
        check(Bench(make=make, reopen=reopen, keeps_unfinished=leaves_unfinished))
    except AssertionError as error:
        error.add_note(promise)
        raise
    except Exception as error:
        # Another class than BackendError is a defect of the backend, or of ``make`` and ``reopen``.
        is_ours = isinstance(error, BackendError)
        what = "an error" if is_ours else "an error that is no BackendError, as all have to be,"
        failed = AssertionError(f"{name}: {what} where none was expected: {error!r}")
        failed.add_note(promise)
        raise failed from error


def check_backend(
    make: Callable[[], Backend],
    *,
    reopen: Callable[[Backend], Backend] | None = None,
    leaves_unfinished: bool = True,
) -> None:
    """Run every check, each on a new backend.

    ``make`` returns an empty backend; ``reopen`` opens a second one on the place of the first, as another process
    would, and is None only if the place exists only in its backend object. ``leaves_unfinished``: a dead writer leaves
    data at the place. Raises AssertionError at the first broken promise.
    """
    for name in CHECKS:
        check_promise(name, make, reopen=reopen, leaves_unfinished=leaves_unfinished)
