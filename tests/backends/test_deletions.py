"""Deletions of many objects from object stores: in how few requests, and what is made of each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from s3_stub import Reply, Stub, error_body, opened, refused, taking

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import ObjectClient
from tierfall.backends.wrappers import Retrying, RetryPolicy
from tierfall.core.types.backend import delete_all
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    UnreachableError,
)

KEYS = [f"step/rank-{number:05}.json" for number in range(2500)]
FEW = KEYS[:4]

Queries = Mapping[str, list[str]]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stub, ObjectClient]]:
    """A stand-in for a server and a client of it, opened once."""
    stub = Stub()
    # A thousand rows may take a busy machine a moment.
    patient = {"connect_timeout": 10, "read_timeout": 10}
    backend = opened(stub, config_kwargs=patient)
    yield stub, backend._client
    backend.close()
    stub.close()


@pytest.fixture
def stub(served: tuple[Stub, ObjectClient]) -> Stub:
    return served[0]


@pytest.fixture
def backend(
    served: tuple[Stub, ObjectClient], monkeypatch: pytest.MonkeyPatch
) -> ObjectStoreBackend:
    monkeypatch.setattr(ObjectStoreBackend, "_probed", lambda self: True)
    served[0].reply = taking
    made = ObjectStoreBackend(served[1])
    served[0].requests.clear()
    return made


class Bucket:
    """Answers deletions as S3 does. ``stubborn``: what is said of keys that do not go, by key; ``asked``: the keys of
    each request for several, in order; ``alone``: how many requests there were for one."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self.there: set[str] = set()
        self.stubborn: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.alone = 0
        stub.reply = self.reply

    def reply(self, method: str, query: Queries) -> Reply:
        if method == "DELETE":
            self.alone += 1
            return 204, ""
        assert method == "POST"
        assert "delete" in query
        root = ElementTree.fromstring(self._stub.body)
        keys = [each.text or "" for each in root.iter() if each.tag.endswith("}Key")]
        self.asked.append([key.removeprefix("run/") for key in keys])
        assert len(set(keys)) == len(keys) <= 1000
        self.there -= set(self.asked[-1]) - self.stubborn.keys()
        return 200, f"<DeleteResult>{''.join(map(self._row, keys))}</DeleteResult>"

    def _row(self, key: str) -> str:
        code = self.stubborn.get(key.removeprefix("run/"))
        name = f"<Key>{escape(key)}</Key>"
        return f"<Error>{name}<Code>{code}</Code></Error>" if code else f"<Deleted>{name}</Deleted>"


@pytest.fixture
def store(stub: Stub, backend: ObjectStoreBackend) -> Bucket:
    return Bucket(stub)


def retrying(backend: ObjectStoreBackend, waits: Callable[[float], None]) -> Retrying:
    return Retrying(backend, RetryPolicy(tries=3, sleep=waits, rng=Random(0)))


def test_a_thousand_go_by_one_request(
    backend: ObjectStoreBackend, store: Bucket, stub: Stub
) -> None:
    delete_all(backend, KEYS)
    assert [len(keys) for keys in store.asked] == [1000, 1000, 500]
    assert [key for keys in store.asked for key in keys] == KEYS
    assert len(stub.requests) == 3


def test_keys_that_fail_are_asked_for_again_alone_and_last(
    backend: ObjectStoreBackend, store: Bucket
) -> None:
    store.stubborn = dict.fromkeys(KEYS[10:13], "SlowDown")

    def heal(wait_s: float) -> None:
        assert store.asked[-1] == KEYS[10:13], "before there was something else to do"
        store.stubborn.clear()

    delete_all(retrying(backend, heal), KEYS[:1500])
    assert store.asked[1:] == [KEYS[1000:1500] + KEYS[10:13], KEYS[10:13], KEYS[10:13]]
    assert store.alone == 0


@pytest.mark.parametrize(
    ("code", "kind"), [("AccessDenied", AccessDeniedError), ("InternalError", UnreachableError)]
)
def test_a_key_that_never_goes_keeps_no_other(
    backend: ObjectStoreBackend,
    store: Bucket,
    stub: Stub,
    code: str,
    kind: type[BackendError],
) -> None:
    store.there = set(FEW)
    store.stubborn = dict.fromkeys(FEW[:2], code)
    answers = store.reply
    stub.reply = lambda method, query: (
        (403, error_body("AccessDenied")) if method == "DELETE" else answers(method, query)
    )
    error = refused(lambda: delete_all(backend, FEW))
    assert type(error) is kind
    assert FEW[0] in str(error)
    assert store.there == set(FEW[:2])
    store.asked.clear()
    refused(lambda: backend.delete_some(FEW[:2]))
    assert store.asked == [FEW[:2]], "it was no refusal of the request"


@pytest.mark.parametrize("lost", ["broken off", (503, error_body("SlowDown")), (500, "")])
def test_what_was_answered_is_not_asked_for_again(
    backend: ObjectStoreBackend, store: Bucket, stub: Stub, lost: Reply | str
) -> None:
    answers, waits = store.reply, list[float]()

    def reply(method: str, query: Queries) -> Reply:
        answer, is_lost = answers(method, query), len(store.asked) == 2
        stub.cut_bytes = 200 if is_lost and isinstance(lost, str) else 0
        return lost if is_lost and not isinstance(lost, str) else answer

    stub.reply = reply
    delete_all(retrying(backend, waits.append), KEYS)
    assert [keys[0] for keys in store.asked] == [KEYS[0], KEYS[1000], KEYS[1000], KEYS[2000]]
    assert len(waits) == 1
    assert store.alone == 0


@pytest.mark.parametrize(
    "answer",
    [
        (501, error_body("NotImplemented")),
        (405, error_body("MethodNotAllowed")),
        (400, error_body("MalformedXML")),
        (403, error_body("AccessDenied")),
        (404, ""),
        (200, ""),
        (200, "<DeleteResult></DeleteResult>"),
    ],
)
def test_a_store_that_does_not_take_it_is_asked_one_by_one_from_then_on(
    backend: ObjectStoreBackend, stub: Stub, answer: Reply
) -> None:
    stub.reply = lambda method, query: (204, "") if method == "DELETE" else answer
    delete_all(backend, FEW)
    delete_all(backend, FEW)
    methods = [request.partition(" ")[0] for request in stub.requests]
    assert methods == ["POST", *["DELETE"] * 8]
