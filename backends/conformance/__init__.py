"""The conformance suite: every promise of ``core.types.backend`` as a check that any backend can be put through.

Plain asserts and no test framework. A backend's own test names a way to make an empty one and runs all checks::

    @pytest.mark.parametrize("name", CHECKS)
    def test_promise(name, tmp_path_factory):
        check_promise(name, lambda: MyBackend(tmp_path_factory.mktemp("tier")), reopen=lambda backend: ...)

or, without a framework, ``check_backend(make, reopen=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tierfall.backends.conformance import reads as reading
from tierfall.backends.conformance import writes as writing
from tierfall.backends.conformance.kit import Bench
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError

__all__ = ["CHECKS", "Check", "check_backend", "check_promise"]

Check = Callable[[Bench], None]

_ALL: tuple[Check, ...] = (
    reading.traits_make_sense,
    writing.nothing_is_visible_before_publish,
    writing.any_length_comes_back,
    writing.an_empty_object_is_an_object,
    writing.disjoint_ranges_from_threads,
    writing.ranges_that_share_a_block,
    writing.offsets_and_memory_of_any_alignment,
    writing.a_writer_keeps_no_reference,
    writing.abort_leaves_nothing,
    writing.a_finished_writer_refuses,
    writing.too_few_bytes_are_refused,
    writing.too_many_bytes_are_refused,
    writing.length_max_is_a_bound,
    writing.a_long_object_comes_back,
    writing.a_long_object_given_up_leaves_nothing,
    writing.the_last_publish_wins,
    writing.replace_is_atomic,
    writing.conditional_create_has_one_winner,
    writing.a_lost_conditional_create_leaves_no_litter,
    writing.what_is_durable_is_there_for_the_next_process,
    writing.what_is_visible_can_be_made_durable,
    reading.any_range_can_be_read,
    reading.what_is_cached_is_the_object,
    reading.reading_past_the_end_is_an_error,
    reading.what_is_missing_is_said_to_be,
    reading.a_scan_is_sorted_and_complete,
    reading.a_prefix_ends_at_a_part,
    reading.a_scan_beside_changes_shows_what_stays,
    reading.delete_can_be_said_twice,
    reading.many_are_deleted_by_few_calls,
    reading.no_key_leads_outside,
    reading.living_writers_are_spared,
    reading.what_the_dead_left_is_removed,
)

CHECKS: Mapping[str, Check] = MappingProxyType({check.__name__: check for check in _ALL})


def check_promise(
    name: str,
    make: Callable[[], Backend],
    *,
    reopen: Callable[[Backend], Backend] | None = None,
    leaves_unfinished: bool = True,
) -> None:
    """Run one check of ``CHECKS``; raises AssertionError, naming the promise, where the backend breaks it."""
    check = CHECKS[name]
    promise = f"the promise: {' '.join((check.__doc__ or name).split())}"
    try:
        check(Bench(make=make, reopen=reopen, leaves_unfinished=leaves_unfinished))
    except AssertionError as error:
        error.add_note(promise)
        raise
    except Exception as error:
        # One that is no BackendError is a mistake in the backend, or in ``make`` and ``reopen``.
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
    """Run every check, each on a fresh backend.

    ``make`` returns an empty backend; ``reopen`` opens a second one on the place of the first, as another process
    would, and is None only where a place lives and dies with its backend object. ``leaves_unfinished``: something stays
    at the place of a writer that dies. Raises AssertionError at the first promise that is broken.
    """
    for name in CHECKS:
        check_promise(name, make, reopen=reopen, leaves_unfinished=leaves_unfinished)
