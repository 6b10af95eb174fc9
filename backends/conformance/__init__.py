"""The conformance suite: every promise of ``core.types.backend`` as a check for any backend.

The checks are plain asserts and need no test framework. A backend's test makes an empty backend and runs all checks::

    @pytest.mark.parametrize("name", CHECKS)
    def test_promise(name, tmp_path_factory):
        check_promise(name, lambda: MyBackend(tmp_path_factory.mktemp("tier")), reopen=lambda backend: ...)

or, without a framework, ``check_backend(make, reopen=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tierfall.backends.conformance import reads, writes
from tierfall.backends.conformance.kit import Bench
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError

__all__ = ["CHECKS", "Check", "check_backend", "check_promise"]

Check = Callable[[Bench], None]

_ALL: tuple[Check, ...] = (
    reads.traits_and_place_are_valid,
    writes.nothing_is_visible_before_publish,
    writes.any_length_comes_back,
    writes.an_empty_object_is_an_object,
    writes.disjoint_ranges_from_threads,
    writes.ranges_that_share_a_block,
    writes.offsets_and_memory_of_any_alignment,
    writes.a_writer_keeps_no_reference,
    writes.abort_leaves_nothing,
    writes.a_finished_writer_refuses,
    writes.too_few_bytes_are_refused,
    writes.too_many_bytes_are_refused,
    writes.length_max_is_a_bound,
    writes.a_long_object_comes_back,
    writes.an_aborted_long_object_leaves_nothing,
    writes.the_last_publish_wins,
    writes.replace_is_atomic,
    writes.conditional_create_has_one_winner,
    writes.a_refused_conditional_create_leaves_nothing,
    writes.durable_objects_exist_after_reopening,
    writes.visible_objects_can_be_synced,
    reads.any_range_can_be_read,
    reads.cached_bytes_are_the_object,
    reads.reading_past_the_end_raises,
    reads.missing_keys_raise_key_not_found,
    reads.a_scan_is_sorted_and_complete,
    reads.a_prefix_ends_at_a_component,
    reads.a_scan_during_changes_is_consistent,
    reads.delete_is_idempotent,
    reads.delete_some_deletes_all_in_the_end,
    reads.invalid_keys_are_refused,
    reads.active_writers_are_kept,
    reads.leftovers_of_dead_writers_are_removed,
)

CHECKS: Mapping[str, Check] = MappingProxyType({check.__name__: check for check in _ALL})


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
