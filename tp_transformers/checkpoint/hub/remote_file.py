"""A file on the Hub, read by HTTP ranges: faults are waited out, answers that are not of this very file are refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session

from ...errors import CheckpointError
from ...slices.source import Source
from .tries import TRANSIENT, HTTPError, Tries, TryAgainError, asked_wait, refused, resolve

PROGRESS_BYTES = 1 << 20
"""Bytes of one answer that start the count of tries anew; or a quarter of what was lacking, where that is less."""

_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Answers of hosts to a signed URL that has expired."""


class RemoteFile(Source):
    """A file on the Hub, of one commit, whose bytes are fetched when they are read. Threads may read at once.

    Answers are taken only if they are of the same file: Content-Range has to give the size that the Hub gave, and all
    answers of one host the same ETag. Both are checked before the body, so that If-Match would add nothing.

    The token goes to the Hub alone: requests to the host that it redirects to carry none.
    """

    is_remote = True

    def __init__(
        self,
        url: str,
        *,
        name: str,
        size: int,
        etag: str,
        location: str,
        token: str | bool | None = None,
        etags: Mapping[str, str] | None = None,
        head: bytes = b"",
    ) -> None:
        """A file at `url` on the Hub, whose bytes are at `location`.

        `head` is the file's first bytes where they are known; `etags` what hosts have called the file in answers.
        """
        super().__init__()
        self.url, self.name, self.size, self.etag, self.location, self.head = url, name, size, etag, location, head
        self.etags: dict[str, str] = dict(etags or {})
        self._token = token
        self._answers = threading.Lock()
        self._closed = threading.Event()

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; one range, taken up again from the byte where an answer broke."""
        target = _Target(offset, buffers)
        target.put(memoryview(self.head)[offset : target.stop])
        tries = Tries(f"checkpoint file {self.name}", self._closed)
        while target.position < target.stop:
            start, lacking = target.position, target.stop - target.position
            if self._closed.is_set():
                raise CheckpointError(f"checkpoint file {self.name}: read after it was closed")
            try:
                self._receive(target)
                if target.position == start:
                    raise TryAgainError("an answer without bytes")
            except (TryAgainError, HTTPError) as error:
                if target.position - start >= min(PROGRESS_BYTES, -(-lacking // 4)):
                    tries.count = 0
                tries.again(error)

    def close(self) -> None:
        """Let no more be read; reads that are under way stop."""
        self._closed.set()

    def _receive(self, target: _Target) -> None:
        """Ask for what `target` lacks, and put what comes into it."""
        location = self.location
        headers = build_hf_headers(token=self._token, library_name="tp_transformers")
        if _origin(location) != _origin(self.url):
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        headers |= {"Range": f"bytes={target.position}-{target.stop - 1}", "Accept-Encoding": "identity"}
        timeout = (constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT, None, None)
        start = target.position
        try:
            with get_session().stream(
                "GET", location, headers=headers, timeout=timeout, follow_redirects=False
            ) as answer:
                stop = self._check(answer, location, target)
                for chunk in answer.iter_raw():
                    if self._closed.is_set():
                        raise CheckpointError(f"checkpoint file {self.name}: closed while it was read")
                    if len(chunk) > stop - target.position:
                        raise self._misserved(f"a body of more than {stop - start} bytes", str(stop - start))
                    target.put(memoryview(chunk))
                if target.position < stop:  # and yet complete: a connection that breaks is an error of its own
                    raise self._misserved(f"a body of {target.position - start} bytes", str(stop - start))
        finally:
            self.count(target.position - start)

    def _check(self, answer: Any, location: str, target: _Target) -> int:
        """Offset in the file at which `answer` ends. Raises unless it is the range of this file that was asked for."""
        status = answer.status_code
        if status == 206:
            found = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", answer.headers.get("Content-Range", ""))
            if not found or int(found[1]) != target.position or int(found[2]) >= target.stop:
                got = f"Content-Range {answer.headers.get('Content-Range')!r}"
                raise self._misserved(got, f"bytes {target.position}-{target.stop - 1} of {self.size}")
            if found[3] not in (str(self.size), "*"):
                raise self._changed(f"{found[3]} bytes", f"{self.size} bytes")
            self._compare(location, answer.headers.get("ETag"))
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.strip().lower() != "identity":
                raise self._misserved(f"Content-Encoding {encoding}", "the bytes as they are")
            expected = int(found[2]) + 1 - target.position
            if (length := answer.headers.get("Content-Length", str(expected))) != str(expected):
                raise self._misserved(f"a body of {length} bytes", str(expected))
            return target.position + expected
        if status == 200:
            raise self._misserved("the whole file in answer to a Range request", "a part of it")
        if answer.has_redirect_location:
            self.location = urljoin(location, answer.headers["Location"])
            raise TryAgainError(f"a redirect to {urlsplit(self.location).hostname}", 0)
        if status in TRANSIENT:
            raise TryAgainError(f"status {status}", asked_wait(answer.headers))
        if status in _EXPIRED and location != self.url:
            self._resolve_anew(location)
            raise TryAgainError(f"status {status} from {urlsplit(location).hostname}", 0)
        if status in (412, 416):
            raise self._changed(f"status {status}", "the range that was asked for")
        raise self.fault(f"status {status}", "a part of the file", "Check the token, and that the file is there.")

    def _compare(self, location: str, etag: str | None) -> None:
        """Raise CheckpointError where a host calls the file another one than it did before."""
        if etag is None:
            return
        etag = etag.removeprefix("W/").strip('"')
        with self._answers:
            known = self.etags.setdefault(_origin(location), self.etag if location == self.url else etag)
        if etag != known:
            raise self._changed(f"ETag {etag}", f"ETag {known}")

    def _resolve_anew(self, location: str) -> None:
        """Ask the Hub where the bytes are now, unless another thread has since `location` was refused."""
        with self._answers:
            if self.location != location:
                return
            try:
                metadata = resolve(self.url, self._token, self._closed)
            except EntryNotFoundError as error:
                raise refused(self.url, error) from error
            if (metadata.etag, metadata.size) != (self.etag, self.size):
                raise self._changed(
                    f"ETag {metadata.etag} and {metadata.size} bytes", f"ETag {self.etag} and {self.size} bytes"
                )
            self.location = metadata.location

    def _misserved(self, got: str, expected: str) -> CheckpointError:
        fix = "The server, or a proxy before it, does not serve ranges rightly; load without tp_stream."
        return self.fault(got, expected, fix)

    def _changed(self, got: str, expected: str) -> CheckpointError:
        return self.fault(got, expected, "The file changed while it was read; load again.")


class _Target:
    """Buffers that consecutive bytes of a file go to; knows how far it is filled."""

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.position = offset
        self.stop = offset + sum(map(len, buffers))
        self._buffers = [buffer for buffer in reversed(buffers) if len(buffer)]

    def put(self, chunk: memoryview) -> None:
        """Append `chunk`, which is no more than is lacking."""
        self.position += len(chunk)
        while chunk:
            buffer = self._buffers.pop()
            count = min(len(buffer), len(chunk))
            buffer[:count] = chunk[:count]
            chunk = chunk[count:]
            if count < len(buffer):
                self._buffers.append(buffer[count:])


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}"
