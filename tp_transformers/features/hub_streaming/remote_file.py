"""A file on the Hub, read by HTTP ranges: transient faults are retried, responses for another file are rejected."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session

from ...errors import CheckpointError
from ...slices.stored import Source
from .tries import (
    BAD_URL,
    TRANSIENT,
    HTTPError,
    Pace,
    StalledError,
    Tries,
    TryAgainError,
    followed,
    hub_error,
    origin,
    printable,
    requested_wait,
    resolve,
    shown,
    within,
)

PROGRESS_BYTES = 1 << 20
"""Bytes of one response that reset the count of tries (or a quarter of the missing bytes, if that is less)."""

MOST_REDIRECTS = 5
"""Most consecutive redirects."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Status codes that hosts return for an expired signed URL."""


class RemoteFile(Source):
    """A file of one commit on the Hub, fetched when it is read. Thread-safe.

    A response must be for the same file: Content-Range must have the size that the Hub reported, and all responses of
    one host the same ETag. Both are checked before the body, so If-Match would add nothing.

    The token is sent to the Hub only, not to hosts that it redirects to.
    """

    etag: str
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
        closed: threading.Event | None = None,
    ) -> None:
        """Open the file at `url` on the Hub, whose bytes are at `location`.

        `head` are the file's first bytes, if known; `etags` are the ETags that hosts have sent for it. Reads stop once
        `closed` is set, by `close` or by a caller that shares it between files.
        """
        super().__init__()
        self.url, self.name, self.size, self.etag, self.location, self.head = url, name, size, etag, location, head
        self.etags: dict[str, str] = dict(etags or {})
        self._token = token
        self._answers = threading.Lock()
        self._closed = closed or threading.Event()

    @property
    def address(self) -> str:
        return self.url

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; fetches one range, resuming at the byte where a response broke off."""
        target = _Target(offset, buffers)
        target.put(memoryview(self.head)[offset : target.stop])
        tries, pace = Tries(f"checkpoint file {self.name}", self._closed), Pace()
        while target.position < target.stop:
            start, lacking, location = target.position, target.stop - target.position, self.location
            if self._closed.is_set():
                raise CheckpointError(f"checkpoint file {self.name}: read after it was closed")
            try:
                self._receive(target, location, pace)
                if target.position == start:
                    raise TryAgainError("an answer without bytes")
            except (TryAgainError, HTTPError) as error:
                progress = target.position - start >= min(PROGRESS_BYTES, -(-lacking // 4))
                if progress and not isinstance(error, StalledError):
                    tries.count = 0
                tries.again(error, location)
                pace.restart()

    def close(self) -> None:
        """Stop running reads and reject later ones."""
        self._closed.set()

    def _receive(self, target: _Target, location: str, pace: Pace) -> None:
        """Request the missing bytes of `target`, and write them into it."""
        start = target.position
        try:
            with ExitStack() as stack:
                answer = self._ask(target, location, stack)
                stop = self._check(answer, location, target)
                if stop == target.stop or stop - start >= PROGRESS_BYTES:
                    pace.restart()  # not for each of many short responses
                for chunk in answer.iter_raw():
                    if self._closed.is_set():
                        raise CheckpointError(f"checkpoint file {self.name}: closed while it was read")
                    if len(chunk) > stop - target.position:
                        got = f"a body of more than {stop - start} bytes"
                        raise self._misserved(got, str(stop - start), location)
                    target.put(memoryview(chunk))
                    if target.position < target.stop:
                        pace.count(len(chunk))
                if target.position < stop:  # the body ended early; a broken connection raises by itself
                    raise self._misserved(f"a body of {target.position - start} bytes", str(stop - start), location)
        finally:
            self.count(target.position - start)

    def _ask(self, target: _Target, location: str, stack: ExitStack) -> Any:
        """Request the missing bytes of `target`; return the response with its body unread, which `stack` closes."""
        headers = build_hf_headers(token=self._token, library_name="tp_transformers")
        try:
            if origin(location) != origin(self.url):
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers |= {"Range": f"bytes={target.position}-{target.stop - 1}", "Accept-Encoding": "identity"}
            timeout = (constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT, None, None)
            request = get_session().stream("GET", location, headers=headers, timeout=timeout, follow_redirects=False)
            answer = within(request.__enter__, late=lambda _: request.__exit__(None, None, None))
        except BAD_URL as error:
            raise self._misserved(f"a URL that cannot be asked ({error})", "one of http or https", location) from error
        stack.push(request)
        return answer

    def _check(self, answer: Any, location: str, target: _Target) -> int:
        """Return the end offset of `answer` in the file. Raises unless it is the requested range of this file."""
        status = answer.status_code
        if status == 206:
            return self._check_range(answer.headers, location, target)
        if status == 200:
            raise self._misserved("the full file in answer to a Range request", "a range of it", location)
        if status in _REDIRECTS:
            self._follow(answer.headers.get("Location"), status, location, target)
        if status in TRANSIENT:
            raise TryAgainError(f"status {status}", requested_wait(answer.headers))
        if status in _EXPIRED and location != self.url:
            self._resolve_anew(location)
            raise TryAgainError(f"status {status} from {urlsplit(location).hostname}", 0)
        if status in (412, 416):
            raise self._changed(f"status {status}", "the range that was asked for", location)
        fix = f"Check the token, and that the file is there. URL: {shown(location)}"
        raise self.fault(f"status {status}", "a range of the file", fix)

    def _check_range(self, headers: Mapping[str, str], location: str, target: _Target) -> int:
        """Check the headers of a range response; return its end offset in the file. Raises as `_check`."""
        content_range = headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", content_range)
        if not match or not int(match[1]) == target.position <= int(match[2]) < target.stop:
            got = f"Content-Range {headers.get('Content-Range')!r}"
            raise self._misserved(got, f"bytes {target.position}-{target.stop - 1} of {self.size}", location)
        if match[3] not in (str(self.size), "*"):
            raise self._changed(f"{match[3]} bytes", f"{self.size} bytes", location)
        self._compare(location, headers.get("ETag"))
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise self._misserved(f"Content-Encoding {encoding}", "the bytes as they are", location)
        expected = int(match[2]) + 1 - target.position
        if (length := headers.get("Content-Length", str(expected))) != str(expected):
            raise self._misserved(f"a body of {length} bytes", str(expected), location)
        return target.position + expected

    def _follow(self, redirect: str | None, status: int, location: str, target: _Target) -> None:
        """Follow a redirect: raises TryAgainError, or CheckpointError if the redirect is invalid."""
        if redirect is None:
            raise self._misserved(f"status {status} without Location", "a redirect that says where to", location)
        target.redirects += 1
        try:
            redirected = followed(location, redirect)
        except ValueError as error:
            got = f"a redirect to {shown(redirect)} ({error})"
            raise self._misserved(got, "one to a URL of http or https", location) from None
        if target.redirects > MOST_REDIRECTS:
            got = f"{target.redirects} redirects one after the other, the last to {shown(redirected)}"
            raise self._misserved(got, f"at most {MOST_REDIRECTS}", location)
        self.location = redirected
        raise TryAgainError(f"a redirect to {urlsplit(redirected).hostname}", 0)

    def _compare(self, location: str, etag: str | None) -> None:
        """Raise CheckpointError if a host sends another ETag than before."""
        if etag is None:
            return
        etag = etag.removeprefix("W/").strip('"')
        with self._answers:
            known = self.etags.setdefault(origin(location), self.etag if location == self.url else etag)
        if etag != known:
            raise self._changed(f"ETag {etag}", f"ETag {known}", location)

    def _resolve_anew(self, location: str) -> None:
        """Resolve the file again after `location` has expired, unless another thread has done so."""
        with self._answers:
            if self.location != location:
                return
            try:
                metadata = resolve(self.url, self._token, self._closed)
            except EntryNotFoundError as error:
                raise hub_error(self.url, error) from error
            if (metadata.etag, metadata.size) != (self.etag, self.size):
                got = f"ETag {metadata.etag} and {metadata.size} bytes"
                raise self._changed(got, f"ETag {self.etag} and {self.size} bytes", self.url)
            self.location = metadata.location

    def _misserved(self, got: str, expected: str, location: str) -> CheckpointError:
        fix = "The server, or a proxy before it, does not serve ranges rightly; load without tp_stream."
        return self.fault(printable(got), expected, f"{fix} URL: {shown(location)}")

    def _changed(self, got: str, expected: str, location: str) -> CheckpointError:
        fix = f"The file changed while it was read; load again. URL: {shown(location)}"
        return self.fault(printable(got), printable(expected), fix)


class _Target:
    """Buffers for consecutive bytes of a file, and the position up to which they are filled."""

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.position = offset
        self.redirects = 0
        """Redirects since the last received bytes."""
        self.stop = offset + sum(map(len, buffers))
        self._buffers = [buffer for buffer in reversed(buffers) if len(buffer)]

    def put(self, chunk: memoryview) -> None:
        """Append `chunk`, which must not exceed the missing bytes."""
        self.position += len(chunk)
        self.redirects = 0
        while chunk:
            buffer = self._buffers.pop()
            count = min(len(buffer), len(chunk))
            buffer[:count] = chunk[:count]
            chunk = chunk[count:]
            if count < len(buffer):
                self._buffers.append(buffer[count:])
