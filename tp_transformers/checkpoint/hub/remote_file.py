"""A file on the Hub, read by HTTP ranges: faults are waited out, answers that are not of this very file are refused."""

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
from ...slices.source import Source
from .tries import TRANSIENT, Pace, StalledError, Tries, TryAgainError, asked_wait, refused, resolve, within
from .urls import BAD_URL, HTTPError, followed, origin, printable, shown

PROGRESS_BYTES = 1 << 20
"""Bytes of one answer that start the count of tries anew; or a quarter of the missing bytes, where that is less."""

MOST_REDIRECTS = 5
"""Redirects that may follow one another."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""Answers of hosts to a signed URL that has expired."""


class RemoteFile(Source):
    """A file of one commit on the Hub; its bytes are fetched when they are read. Threads may read at once.

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
        closed: threading.Event | None = None,
    ) -> None:
        """A file at `url` on the Hub, with its bytes at `location`.

        `head` is the file's first bytes where they are known; `etags` what hosts have called the file in answers.
        `closed` stops reads once it is set, by `close` or by whoever reads several files with it.
        """
        super().__init__()
        self.url, self.name, self.size, self.etag, self.location, self.head = url, name, size, etag, location, head
        self.etags: dict[str, str] = dict(etags or {})
        self._token = token
        self._answers = threading.Lock()
        self._closed = closed or threading.Event()

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; one range, taken up again from the byte where an answer broke."""
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
        """Let no more be read; reads that are under way stop."""
        self._closed.set()

    def _receive(self, target: _Target, location: str, pace: Pace) -> None:
        """Ask for the missing bytes of `target`, and write them into it."""
        start = target.position
        try:
            with ExitStack() as stack:
                answer = self._ask(target, location, stack)
                stop = self._check(answer, location, target)
                if stop == target.stop or stop - start >= PROGRESS_BYTES:
                    pace.restart()  # but not for each of many short answers
                for chunk in answer.iter_raw():
                    if self._closed.is_set():
                        raise CheckpointError(f"checkpoint file {self.name}: closed while it was read")
                    if len(chunk) > stop - target.position:
                        got = f"a body of more than {stop - start} bytes"
                        raise self._misserved(got, str(stop - start), location)
                    target.put(memoryview(chunk))
                    if target.position < target.stop:
                        pace.count(len(chunk))
                if target.position < stop:  # and yet complete: a connection that breaks is an error of its own
                    raise self._misserved(f"a body of {target.position - start} bytes", str(stop - start), location)
        finally:
            self.count(target.position - start)

    def _ask(self, target: _Target, location: str, stack: ExitStack) -> Any:
        """The answer to a request for the missing bytes of `target`, its body not read yet; `stack` will close it."""
        headers = build_hf_headers(token=self._token, library_name="tp_transformers")
        try:
            if origin(location) != origin(self.url):
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers |= {"Range": f"bytes={target.position}-{target.stop - 1}", "Accept-Encoding": "identity"}
            timeout = (constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT, None, None)
            asked = get_session().stream("GET", location, headers=headers, timeout=timeout, follow_redirects=False)
            answer = within(asked.__enter__, late=lambda _: asked.__exit__(None, None, None))
        except BAD_URL as error:
            raise self._misserved(f"a URL that cannot be asked ({error})", "one of http or https", location) from error
        stack.push(asked)
        return answer

    def _check(self, answer: Any, location: str, target: _Target) -> int:
        """Offset of the end of `answer` in the file. Raises unless it is the range of this file that was asked for."""
        status = answer.status_code
        if status == 206:
            return self._check_range(answer.headers, location, target)
        if status == 200:
            raise self._misserved("the whole file in answer to a Range request", "a part of it", location)
        if status in _REDIRECTS:
            self._follow(answer.headers.get("Location"), status, location, target)
        if status in TRANSIENT:
            raise TryAgainError(f"status {status}", asked_wait(answer.headers))
        if status in _EXPIRED and location != self.url:
            self._resolve_anew(location)
            raise TryAgainError(f"status {status} from {urlsplit(location).hostname}", 0)
        if status in (412, 416):
            raise self._changed(f"status {status}", "the range that was asked for", location)
        fix = f"Check the token, and that the file is there. URL: {shown(location)}"
        raise self.fault(f"status {status}", "a part of the file", fix)

    def _check_range(self, headers: Mapping[str, str], location: str, target: _Target) -> int:
        """Offset of the end of an answer with these headers in the file; raises as `_check`."""
        given = headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", given)
        if not found or not int(found[1]) == target.position <= int(found[2]) < target.stop:
            got = f"Content-Range {headers.get('Content-Range')!r}"
            raise self._misserved(got, f"bytes {target.position}-{target.stop - 1} of {self.size}", location)
        if found[3] not in (str(self.size), "*"):
            raise self._changed(f"{found[3]} bytes", f"{self.size} bytes", location)
        self._compare(location, headers.get("ETag"))
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise self._misserved(f"Content-Encoding {encoding}", "the bytes as they are", location)
        expected = int(found[2]) + 1 - target.position
        if (length := headers.get("Content-Length", str(expected))) != str(expected):
            raise self._misserved(f"a body of {length} bytes", str(expected), location)
        return target.position + expected

    def _follow(self, given: str | None, status: int, location: str, target: _Target) -> None:
        """Ask elsewhere from now on: raises TryAgainError, or CheckpointError where the redirect leads nowhere."""
        if given is None:
            raise self._misserved(f"status {status} without Location", "a redirect that says where to", location)
        target.redirects += 1
        try:
            found = followed(location, given)
        except ValueError as error:
            got = f"a redirect to {shown(given)} ({error})"
            raise self._misserved(got, "one to a URL of http or https", location) from None
        if target.redirects > MOST_REDIRECTS:
            got = f"{target.redirects} redirects one after the other, the last to {shown(found)}"
            raise self._misserved(got, f"at most {MOST_REDIRECTS}", location)
        self.location = found
        raise TryAgainError(f"a redirect to {urlsplit(found).hostname}", 0)

    def _compare(self, location: str, etag: str | None) -> None:
        """Raise CheckpointError where a host calls the file another one than it did before."""
        if etag is None:
            return
        etag = etag.removeprefix("W/").strip('"')
        with self._answers:
            known = self.etags.setdefault(origin(location), self.etag if location == self.url else etag)
        if etag != known:
            raise self._changed(f"ETag {etag}", f"ETag {known}", location)

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
    """Buffers that consecutive bytes of a file go to; knows how far it is filled."""

    def __init__(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.position = offset
        self.redirects = 0
        """Redirects since the last bytes came."""
        self.stop = offset + sum(map(len, buffers))
        self._buffers = [buffer for buffer in reversed(buffers) if len(buffer)]

    def put(self, chunk: memoryview) -> None:
        """Append `chunk`, which is no more than is lacking."""
        self.position += len(chunk)
        self.redirects = 0
        while chunk:
            buffer = self._buffers.pop()
            count = min(len(buffer), len(chunk))
            buffer[:count] = chunk[:count]
            chunk = chunk[count:]
            if count < len(buffer):
                self._buffers.append(buffer[count:])
