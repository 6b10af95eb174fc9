"""Requests to an S3 bucket that obstore has no call for, and the XML that answers them.

A request is signed and sent once. Nothing here knows what an object is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree

from tierfall.backends.s3.connections import NO_HEADERS, Answer, Lines, checked
from tierfall.backends.s3.signing import Sign
from tierfall.core.types.errors import BackendError


class Requests:
    """What can be asked of one bucket, over ``lines`` to its address."""

    def __init__(self, lines: Lines, sign: Sign) -> None:
        self.lines = lines
        self.sign = sign

    def ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Answer:
        """Ask once; return the answer, or raise the error that it is."""
        return checked(self.answer(method, key, query, what, body, headers), what)

    def answer(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        what: str,
        body: memoryview | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Answer:
        """Ask once; return the answer, whatever it is."""
        url = f"{self.lines.at(key)}?{urlencode(query, quote_via=quote, safe='')}"
        signed = self.sign(method, url, what)
        return self.lines.send(method, signed, what, body=body, headers=headers)


class Page:
    """An answer's elements; the outermost must be called ``root``, where that is given."""

    def __init__(self, text: str, what: str, *, root: str | None = None) -> None:
        try:
            self._root = ElementTree.fromstring(text)
        except ElementTree.ParseError:
            raise BackendError(
                f"{what}: the store's answer is no XML; is this an S3 server?"
            ) from None
        if root not in (None, _name(self._root)):
            raise BackendError(f"{what}: the store's answer is no {root}; is this an S3 server?")
        # Not every store heeds ``encoding-type``; whoever does says so.
        self._is_coded = self.text("EncodingType") == "url"

    def text(self, name: str) -> str:
        """Return the text of an element, or ''."""
        return next((each.text or "" for each in self._root if _name(each) == name), "")

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return what stands directly in each element of that name; ``Key`` is the name of an object."""
        found = []
        for element in self._root:
            if _name(element) == name:
                row = {_name(child): child.text or "" for child in element}
                key = row.get("Key", "")
                found.append({**row, "Key": unquote_plus(key) if self._is_coded else key})
        return found


def root_name(text: str) -> str:
    """Return the name of an answer's outermost element; '' where it is no XML, or not all of it."""
    try:
        return _name(ElementTree.fromstring(text))
    except ElementTree.ParseError:
        return ""


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
