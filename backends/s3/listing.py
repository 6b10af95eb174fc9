"""What lies in an S3 bucket, over S3's own ListObjectsV2: one name that obstore does not take fails its whole listing.

Names come encoded, so that those that XML cannot hold come too.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierfall.backends.object.client import Row
from tierfall.backends.s3.requests import Page, Requests
from tierfall.core.types.errors import BackendError

_ROWS_MAX = 1000


class Listing(Requests):
    """The one request that lists objects."""

    def rows(self, prefix: str, what: str, *, rows_max: int = _ROWS_MAX) -> Iterator[Row]:
        """Every object whose key starts with ``prefix``, ``rows_max`` for each request."""
        query = {"list-type": "2", "encoding-type": "url", "max-keys": str(rows_max)}
        marks: dict[str, str] = {}
        while True:
            text = self.ask("GET", "", {**query, "prefix": prefix, **marks}, what).text
            page = Page(text, what, root="ListBucketResult")
            for row in page.rows("Contents"):
                if not row.get("Size", "").isdigit():
                    raise BackendError(f"{what}: the store lists an object without its size")
                yield Row(row["Key"], int(row["Size"]), row.get("ETag", ""))
            if page.text("IsTruncated") != "true":
                return
            following = {"continuation-token": page.text("NextContinuationToken")}
            if following == marks or not following["continuation-token"]:
                raise BackendError(f"{what}: the store's listing does not go on")
            marks = following
