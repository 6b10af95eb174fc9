"""Deleting many objects by S3's own DeleteObjects: obstore's call for it tells of one failure only."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tierfall.backends.object.responses import left_of
from tierfall.backends.s3.requests import Page, Requests

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class S3Deletions(Requests):
    """The one request that deletes several objects; see ``Deletions``."""

    keys_max = 1000

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        rows = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f'<Delete xmlns="{_NAMESPACE}">{rows}</Delete>'.encode()
        # S3 takes this request with a digest only, and the older one is what every store knows.
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"Content-MD5": base64.b64encode(digest).decode()}
        text = self.ask("POST", "", {"delete": ""}, what, memoryview(body), headers).text
        page = Page(text, what, root="DeleteResult")
        return left_of(keys, page.rows("Deleted"), page.rows("Error"), what)
