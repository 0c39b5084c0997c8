"""An object store on the loopback that waits before it answers, and remembers who asked for what.

It speaks as much of S3 as s3fs and obstore need, over a folder in memory. Run it as a process of
its own: ``python benchmarks/object_store.py --port 9000 --delay 0.02``. ``GET /-/log`` returns
the requests since the last such call, as JSON, and the most that were in flight at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

_MODIFIED = formatdate(0, usegmt=True)
_ISO = "1970-01-01T00:00:00.000Z"


class ObjectStore:
    """Objects by bucket and key."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, after the delay."""
        if request.path == "/-/log":
            report = {"requests": self.log, "most_in_flight": self.most_in_flight}
            self.log, self.most_in_flight = [], 0
            return web.json_response(report)
        if request.path == "/-/delay":
            self.delay_s = float(request.query["s"])
            return web.Response()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        entry = {
            "method": request.method,
            "path": unquote(request.path),
            "query": request.query_string,
            "range": request.headers.get("Range"),
            "copies": "x-amz-copy-source" in request.headers,
            "begin": time.perf_counter(),
        }
        self.log.append(entry)
        try:
            body = await request.read()
            await asyncio.sleep(self.delay_s)
            response = self._response(request, body)
            entry |= {"status": response.status, "bytes": len(response.body or b"")}
            return response
        finally:
            entry["end"] = time.perf_counter()
            self.in_flight -= 1

    def _response(self, request: web.Request, body: bytes) -> web.Response:
        bucket, _, key = unquote(request.path).lstrip("/").partition("/")
        query = parse_qs(request.query_string, keep_blank_values=True)
        name = f"{bucket}/{key}"
        match request.method:
            case "GET" if not key:
                return self._listed(bucket, query)
            case "GET" | "HEAD":
                return self._read(name, request)
            case "PUT" if not key:
                return web.Response()
            case "PUT":
                return self._put(name, query, body, request.headers.get("x-amz-copy-source"))
            case "POST" if "delete" in query:
                return self._delete_many(bucket, body)
            case "POST":
                return self._multipart(name, query, bucket, key)
            case "DELETE":
                self.objects.pop(name, None)
                return web.Response(status=204)
        return web.Response(status=405)

    def _read(self, name: str, request: web.Request) -> web.Response:
        data = self.objects.get(name)
        if data is None:
            return _xml("<Error><Code>NoSuchKey</Code></Error>", 404)
        headers = {"ETag": _etag(data), "Last-Modified": _MODIFIED, "Accept-Ranges": "bytes"}
        status, total = 200, len(data)
        if (asked := request.headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(total - int(last), 0)
            stop = min(int(last) + 1, total) if first and last else total
            if start >= total:
                return _xml("<Error><Code>InvalidRange</Code></Error>", 416)
            data, status = data[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(total)})
        return web.Response(body=data, status=status, headers=headers)

    def _put(
        self, name: str, query: dict[str, list[str]], body: bytes, source: str | None
    ) -> web.Response:
        if source is not None:
            body = self.objects[unquote(source).lstrip("/")]
        if "uploadId" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        else:
            self.objects[name] = body
        if source is not None:
            return _xml(f"<CopyObjectResult><ETag>{_etag(body)}</ETag></CopyObjectResult>")
        return web.Response(headers={"ETag": _etag(body)})

    def _multipart(
        self, name: str, query: dict[str, list[str]], bucket: str, key: str
    ) -> web.Response:
        if "uploads" in query:
            upload = str(len(self.uploads))
            self.uploads[upload] = {}
            kind = "InitiateMultipartUploadResult"
            inside = f"<UploadId>{upload}</UploadId>"
        else:
            parts = self.uploads.pop(query["uploadId"][0])
            self.objects[name] = b"".join(parts[number] for number in sorted(parts))
            kind, inside = "CompleteMultipartUploadResult", f"<ETag>{_etag(b'')}</ETag>"
        place = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
        return _xml(f"<{kind}>{place}{inside}</{kind}>")

    def _delete_many(self, bucket: str, body: bytes) -> web.Response:
        for element in ElementTree.fromstring(body).iter():
            if element.tag.endswith("Key"):
                self.objects.pop(f"{bucket}/{element.text}", None)
        return _xml("<DeleteResult></DeleteResult>")

    def _listed(self, bucket: str, query: dict[str, list[str]]) -> web.Response:
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        start = f"{bucket}/{prefix}"
        found, folders = [], set()
        for name in sorted(self.objects):
            if not name.startswith(start):
                continue
            key = name[len(bucket) + 1 :]
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if mark:
                folders.add(prefix + head + mark)
            else:
                found.append(key)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_ISO}</LastModified>"
            f"<ETag>{_etag(self.objects[f'{bucket}/{key}'])}</ETag>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'])}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in found
        )
        shared = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return _xml(
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{contents}{shared}"
            "</ListBucketResult>"
        )


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _xml(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="application/xml")


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    arguments = parser.parse_args()
    app = web.Application(client_max_size=2**30)
    store = ObjectStore(arguments.delay)
    app.router.add_route("*", "/{path:.*}", store.answer)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, handle_signals=True)


if __name__ == "__main__":
    main()
