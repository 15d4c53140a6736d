"""A file on a server, read by HTTP Range requests through the session of huggingface_hub."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_hf_file_metadata
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import HfFileMetadata
from huggingface_hub.utils import build_hf_headers, get_session, parse_ratelimit_headers

from ...errors import CheckpointError, describe
from ..reading.source import Source

TRIES = 6
"""How often a request is made before its error is final; bytes that came in between start the count anew."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0
"""Seconds before the second try, doubled for each one after it, up to the longest."""
LONGEST_RETRY_AFTER = 300.0
"""The most seconds that a server may make us wait by Retry-After or its rate limit headers."""
PROGRESS_BYTES = 1 << 20
"""Bytes of one answer that start the count of tries anew; or a quarter of what was lacking, where that is less."""

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""What hosts answer to a signed URL whose time is over."""

# httpx or httpx2, as the installed huggingface_hub has it.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]

T = TypeVar("T")


class _TryAgainError(Exception):
    """A fault that another request may mend, `wait` seconds later: 0 for at once, None for when it seems best."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class _Tries:
    """Counts the tries of one request, and waits between them."""

    def __init__(self, subject: str, closed: threading.Event) -> None:
        self.subject, self.closed, self.count = subject, closed, 0

    def again(self, error: Exception) -> None:
        """Wait before the next try. Raises CheckpointError where `error` was that of the last one."""
        self.count += 1
        if self.count < TRIES:
            wait = min(FIRST_WAIT * 2 ** (self.count - 1), LONGEST_WAIT) * random.uniform(0.5, 1)
            asked = getattr(error, "wait", None)
            if not self.closed.wait(asked and asked + wait if asked is not None else wait):
                return
        raise CheckpointError(
            describe(
                self.subject,
                got=f"{_told(error)} in {self.count} tries",
                expected="an answer",
                fix="Check the network and HF_ENDPOINT, and load again.",
            )
        ) from error


def resolve(url: str, token: str | bool | None = None, closed: threading.Event | None = None) -> HfFileMetadata:
    """What the Hub says of the file at `url`: commit, ETag, size and where its bytes are.

    Raises:
        EntryNotFoundError: where the repository has no such file.
        CheckpointError: where the Hub cannot be reached, refuses, or does not say what a Hub says.
    """
    metadata = ask_hub(url, partial(get_hf_file_metadata, url, token=token), closed)
    if metadata.commit_hash and metadata.etag and metadata.size is not None:
        return metadata
    raise CheckpointError(
        describe(
            url,
            got="an answer without commit, ETag or size",
            expected="what the Hugging Face Hub answers",
            fix="Check HF_ENDPOINT, proxies and firewalls.",
        )
    )


def ask_hub(url: str, question: Callable[[], T], closed: threading.Event | None = None) -> T:
    """The answer to a `question` that huggingface_hub asks, in as many tries as it takes; raises as `resolve`."""
    tries = _Tries(url, closed or threading.Event())
    while True:
        try:
            return question()
        except EntryNotFoundError:
            raise
        except (_HTTPError, OSError) as error:
            # transformers wraps what huggingface_hub raises.
            cause = error if isinstance(error, _HTTPError) else error.__cause__
            if isinstance(cause, HfHubHTTPError):
                if cause.response.status_code not in _TRANSIENT:
                    raise refused(url, cause) from error
                cause = _TryAgainError(f"status {cause.response.status_code}", _asked_wait(cause.response.headers))
            elif not isinstance(cause, _HTTPError):
                raise
            tries.again(cause)


class RemoteFile(Source):
    """A file on the Hub, of one commit, whose bytes are fetched when they are read. Threads may read at once.

    Answers are taken only if they are of the same file: their Content-Range has to tell the size that the Hub told, and
    all answers of one host the same ETag. That is seen before the body, so that If-Match would add nothing.

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
        tries = _Tries(f"checkpoint file {self.name}", self._closed)
        while target.position < target.stop:
            start, lacking = target.position, target.stop - target.position
            if self._closed.is_set():
                raise CheckpointError(f"checkpoint file {self.name}: read after it was closed")
            try:
                self._receive(target)
                if target.position == start:
                    raise _TryAgainError("an answer without bytes")
            except (_TryAgainError, _HTTPError) as error:
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
        """Where in the file `answer` ends. Raises unless it is the part of this very file that was asked for."""
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
            raise _TryAgainError(f"a redirect to {urlsplit(self.location).hostname}", 0)
        if status in _TRANSIENT:
            raise _TryAgainError(f"status {status}", _asked_wait(answer.headers))
        if status in _EXPIRED and location != self.url:
            self._resolve_anew(location)
            raise _TryAgainError(f"status {status} from {urlsplit(location).hostname}", 0)
        if status in (412, 416):
            raise self._changed(f"status {status}", "the range that was asked for")
        raise self._fault(f"status {status}", "a part of the file", "Check the token, and that the file is there.")

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
        return self._fault(got, expected, fix)

    def _changed(self, got: str, expected: str) -> CheckpointError:
        return self._fault(got, expected, "The file changed while it was read; load again.")

    def _fault(self, got: str, expected: str, fix: str) -> CheckpointError:
        return CheckpointError(describe(f"checkpoint file {self.name}", got=got, expected=expected, fix=fix))


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


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, by its rate limit or Retry-After header."""
    limit = parse_ratelimit_headers(headers)
    asked = re.fullmatch(r"\s*(\d{1,9})\s*", headers.get("Retry-After", ""))
    seconds = limit.reset_in_seconds if limit and not limit.remaining else int(asked[1]) if asked else None
    return None if seconds is None else min(float(seconds), LONGEST_RETRY_AFTER)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, _TryAgainError) else f"{type(error).__name__}: {error}"


def refused(url: str, error: Exception) -> CheckpointError:
    """The error of a Hub that says no."""
    name = urlsplit(url).path.lstrip("/")
    access = "For a private or gated repository, log in with `hf auth login` or pass token=."
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    kinds: list[tuple[Any, str]] = [
        (GatedRepoError, "a gated repository that this token has no access to"),
        (RepositoryNotFoundError, "no such repository, or one that this token has no access to"),
        (RevisionNotFoundError, "no such revision"),
        (EntryNotFoundError, "no such file"),
    ]
    got = next((text for kind, text in kinds if isinstance(error, kind)), f"status {status}")
    return CheckpointError(describe(f"{name} on the Hub", got=got, expected="a file that can be read", fix=access))
