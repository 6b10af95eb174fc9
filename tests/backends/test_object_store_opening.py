"""Opening a store: where credentials come from, what is tried again, and that an opening leaves no probe behind."""

from __future__ import annotations

import pytest
from backend_places import no_sleep
from s3_stub import Reply, Stub, error_body, refused, taking

from tierfall.backends.open import open_backend
from tierfall.core.types.errors import UnreachableError


def replying(stub: Stub, statuses: list[int], code: str = "") -> None:
    """Let the first conditional creates be answered so; what comes then is taken."""
    left = list(reversed(statuses))

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if method != "PUT" or not left:
            return taking(method, query)
        status = left.pop()
        return status, error_body(code) if code and status not in (200, 412) else ""

    stub.reply = reply


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([503, 200, 412], ""),
        ([200, 503, 200, 412], ""),
        ([200, 500, 503, 200, 412], "InternalError"),
        ([409, 200, 412], "ConditionalRequestConflict"),
    ],
)
def test_what_passes_at_open_is_tried_again(stub: Stub, statuses: list[int], code: str) -> None:
    replying(stub, statuses, code)
    made = open_backend("s3://bucket/run", options=stub.options, sleep=no_sleep)
    assert made.traits.conditional_create
    made.close()
    put_, deleted = (
        {request.split("?")[0].split()[1] for request in stub.requests if request.startswith(verb)}
        for verb in ("PUT", "DELETE")
    )
    assert put_ == deleted, "a probe is left behind"
    assert len(put_) > 1, "a name is used again"


@pytest.mark.parametrize(("answer_s", "waited"), [(0.0, 3), (3.5, 1), (20.0, 0)])
def test_patience_at_open_ends(stub: Stub, answer_s: float, waited: int) -> None:
    """After a number of tries, or where the store takes long over its refusals, after some seconds."""
    waits: list[float] = []
    now_s = 0.0

    def busy(method: str, query: dict[str, list[str]]) -> Reply:
        nonlocal now_s
        now_s += answer_s
        return 503, ""

    def sleep(seconds: float) -> None:
        nonlocal now_s
        waits.append(seconds)
        now_s += seconds

    stub.reply = busy
    error = refused(
        lambda: open_backend(
            "s3://bucket/run",
            options=stub.options,
            sleep=sleep,
            clock=lambda: now_s,
        )
    )
    assert type(error) is UnreachableError
    assert len(waits) == waited
    assert sum(waits) < 3


def test_a_definite_refusal_at_open_is_not_tried_again(stub: Stub) -> None:
    stub.reply = lambda method, query: (403, error_body("AccessDenied"))
    waits: list[float] = []
    refused(lambda: open_backend("s3://bucket/run", options=stub.options, sleep=waits.append))
    assert waits == []
