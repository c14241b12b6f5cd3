"""Objects in one container of Azure Blob Storage, where its words differ from those of S3."""

from __future__ import annotations

from lmcache_backend_s3.bucket import Bucket, Entry, Refused, text
from lmcache_backend_s3.transport import Call


class Container(Bucket):
    """One container. A blob is written by one request, whatever its length."""

    most_keys = 5000

    def put_headers(self, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "x-ms-blob-type": "BlockBlob"}

    def taken(self, refused: Refused) -> bool:
        return refused.status == 412 or refused.code == "BlobAlreadyExists"

    def list(
        self, prefix: str, after: str | None, limit: int, call: Call, /
    ) -> tuple[list[Entry], str | None]:
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        query["maxresults"] = str(min(limit, self.most_keys))
        if after is not None:
            query["marker"] = after
        tree = self.document(call, query)
        found = []
        for one in tree.iter("Blob"):
            about = one.find("Properties")
            if about is not None:
                nbytes = int(text(about, "Content-Length"))
                found.append(Entry(text(one, "Name"), nbytes, text(about, "Etag")))
        return found, text(tree, "NextMarker") or None
