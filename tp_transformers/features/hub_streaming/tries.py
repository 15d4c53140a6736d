"""Retries of requests to the Hub after transient faults: at once, after a backoff, or after the server's Retry-After.

huggingface_hub's `http_stream_backoff` does not resume an interrupted body, does not stop waiting when a file is
closed, and does not limit Retry-After. Its timeouts apply to one `recv` call, so a server that sends single bytes never
hits them. Here `Pace` enforces a minimum rate for a body, and `within` a timeout for a response.
"""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from time import monotonic
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
from huggingface_hub.utils import parse_ratelimit_headers

from ...errors import CheckpointError, size
from ...logs import get_logger

# httpx or httpx2, whichever the installed huggingface_hub uses.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_httpx: Any = sys.modules[HTTPError.__module__.partition(".")[0]]

BAD_URL: tuple[type[Exception], ...] = (ValueError, _httpx.InvalidURL)
"""Errors of urllib, the socket module and httpx for invalid URLs and host names."""

_SHOWN = 200
"""Most characters of a server's or library's text in an error message."""


def origin(url: str) -> str:
    """Return scheme, host and port of a URL. Raises ValueError for a bad port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def shown(url: str) -> str:
    """Format a URL for an error message: without user, password, query and fragment, in printable ASCII."""
    url = url.partition("?")[0].partition("#")[0]
    scheme, mark, rest = url.partition("//")
    host, slash, path = rest.partition("/")
    text = scheme + mark + host.rpartition("@")[2] + slash + path
    return printable(text)


def printable(text: str) -> str:
    """Truncate the text of a server or a library, and escape it to one line of ASCII."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text[:_SHOWN])


def followed(url: str, location: str) -> str:
    """Resolve the `Location` header of a response from `url`, which may be relative, to an absolute URL.

    Raises ValueError, with the reason, if it is not an http or https URL.
    """
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"the scheme {parts.scheme!r}")
        if not parts.hostname:
            raise ValueError("no host")
        origin(target)
        _httpx.URL(target)
    except BAD_URL as error:
        raise ValueError(printable(str(error))) from None
    return target


logger = get_logger(__name__)

TRIES = 6
"""Tries of a request before its error is final; received bytes reset the count."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0
"""Seconds before the second try, doubled for each later one, up to the longest."""
LONGEST_RETRY_AFTER = 300.0
"""Most seconds of one wait that a server may ask for, by Retry-After or rate limit headers. The Hub limits requests per
300 s."""
LONGEST_WAITED = 600.0
"""Most seconds that servers may ask one request to wait, over all its tries."""
LOGGED_WAIT = 5.0
"""Waits of at least this many seconds are logged as a warning."""
SLOWEST_RATE, PACE_SECONDS = 1 << 10, 30.0
"""A body is stalled if it averages less than this many bytes a second over this many seconds."""
ANSWER_SECONDS = 60.0
"""Timeout in seconds for the headers of a response."""
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

T = TypeVar("T")


class TryAgainError(Exception):
    """A transient fault: retry after `wait` seconds (0: at once; None: after the default backoff)."""

    expected = "an answer"
    fix = "Check the network and HF_ENDPOINT, and load again."

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class StalledError(TryAgainError):
    """A response that is too slow; its bytes do not reset the count of tries."""

    fix = "Check the network and HF_ENDPOINT, or download the files first and load them from disk."

    def __init__(self, message: str, expected: str) -> None:
        super().__init__(message, 0)
        self.expected = expected


class Tries:
    """The tries of one request and the waits between them."""

    def __init__(self, subject: str, closed: threading.Event) -> None:
        self.subject, self.closed, self.count = subject, closed, 0
        self.waited = 0.0
        """Seconds waited at the request of servers."""

    def again(self, error: Exception, url: str = "") -> None:
        """Wait before the next try. Raises CheckpointError if `error`, of a request to `url`, is final."""
        self.count += 1
        kind = "" if isinstance(error, TryAgainError) else f"{type(error).__name__}: "
        reason, url_text = printable(f"{kind}{error}").rstrip("."), f" URL: {shown(url)}" if url else ""
        requested = getattr(error, "wait", None)
        if requested and (requested > LONGEST_RETRY_AFTER or self.waited + requested > LONGEST_WAITED):
            raise CheckpointError(
                self.subject,
                got=f"{reason} and the server's wish to wait {requested:.0f} s, after {self.waited:.0f} s",
                expected=f"waits of at most {LONGEST_RETRY_AFTER:.0f} s, and {LONGEST_WAITED:.0f} s in all",
                fix=f"Load again later, with a token where you had none, or load from disk.{url_text}",
            ) from error
        if self.count < TRIES:
            wait = min(FIRST_WAIT * 2 ** (self.count - 1), LONGEST_WAIT) * random.uniform(0.5, 1)
            if requested is not None:
                self.waited += requested
                wait = requested and requested + wait
            if isinstance(error, StalledError) or wait >= LOGGED_WAIT:
                text = "%s: %s; try %d of %d in %.0f s. Interrupt the process (Ctrl-C) to stop.%s"
                logger.warning(text, self.subject, reason, self.count + 1, TRIES, wait, url_text)
            if not self.closed.wait(wait):
                return
        raise CheckpointError(
            self.subject,
            got=f"{reason} in {self.count} tries",
            expected=getattr(error, "expected", TryAgainError.expected),
            fix=getattr(error, "fix", TryAgainError.fix) + url_text,
        ) from error


class Pace:
    """The rate at which bytes of a request arrive; `restart` it for each try."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began, self._nbytes = monotonic(), 0

    def count(self, nbytes: int) -> None:
        """Count received bytes. Raises StalledError if the average rate is too low.

        A longer HF_HUB_DOWNLOAD_TIMEOUT also extends the time over which the rate is averaged.
        """
        self._nbytes += nbytes
        seconds = monotonic() - self._began
        if seconds < max(PACE_SECONDS, constants.HF_HUB_DOWNLOAD_TIMEOUT):
            return
        if self._nbytes < SLOWEST_RATE * PACE_SECONDS:
            raise StalledError(f"{self._nbytes} bytes in {seconds:.0f} s", f"at least {size(SLOWEST_RATE)} a second")
        self.restart()


def within(function: Callable[[], T], *, late: Callable[[T], object] = lambda value: None) -> T:
    """Run `function`, which queries a server, in a thread with a timeout; pass a late result to `late`.

    Raises StalledError after ANSWER_SECONDS, or after huggingface_hub's timeouts if they are longer; the thread keeps
    running until the server responds.
    """
    seconds = max(ANSWER_SECONDS, constants.HF_HUB_ETAG_TIMEOUT + constants.HF_HUB_DOWNLOAD_TIMEOUT)
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    def discard(answer: Future[T]) -> None:
        if answer.exception() is None:
            late(answer.result())

    threading.Thread(target=ask, name="ask", daemon=True).start()
    try:
        return answer.result(seconds)
    except FutureTimeoutError:
        if answer.done() and answer.exception() is not None:
            raise
        answer.add_done_callback(discard)
        raise StalledError(f"no answer in {seconds:.0f} s", TryAgainError.expected) from None
    except BaseException:  # for example KeyboardInterrupt
        answer.add_done_callback(discard)
        raise


def resolve(url: str, token: str | bool | None = None, closed: threading.Event | None = None) -> HfFileMetadata:
    """Query the Hub for commit, ETag, size and location of the file at `url`.

    Raises:
        EntryNotFoundError: the repository has no such file.
        CheckpointError: the Hub is unreachable, denies access, or sends an invalid response.
    """
    question = partial(within, partial(get_hf_file_metadata, url, token=token))
    try:
        metadata: HfFileMetadata = ask_hub(url, question, closed)
    except BAD_URL as error:
        raise _invalid_response(url, f"an answer that cannot be read: {error}") from error
    if not metadata.commit_hash or not metadata.etag or metadata.size is None:
        raise _invalid_response(url, "an answer without commit, ETag or size")
    if not 0 <= metadata.size < 1 << 63:
        raise _invalid_response(url, f"a size of {metadata.size} bytes")
    try:
        return replace(metadata, location=followed(url, metadata.location))
    except ValueError as error:
        raise _invalid_response(url, f"a redirect to {shown(metadata.location)}: {error}") from None


def _invalid_response(url: str, got: str) -> CheckpointError:
    expected, fix = "what the Hugging Face Hub answers", "Check HF_ENDPOINT, proxies and firewalls."
    return CheckpointError(shown(url), got=printable(got), expected=expected, fix=fix)


def ask_hub(url: str, question: Callable[[], T], closed: threading.Event | None = None) -> T:
    """Call `question`, a request of huggingface_hub, and retry it after transient faults; raises as `resolve`."""
    tries = Tries(shown(url), closed or threading.Event())
    while True:
        try:
            return question()
        except EntryNotFoundError:
            raise
        except TryAgainError as error:
            tries.again(error)
        except (HTTPError, OSError) as error:
            # transformers wraps what huggingface_hub raises.
            cause = error if isinstance(error, HTTPError) else error.__cause__
            if isinstance(cause, HfHubHTTPError):
                if cause.response.status_code not in TRANSIENT:
                    raise hub_error(url, cause) from error
                cause = TryAgainError(f"status {cause.response.status_code}", requested_wait(cause.response.headers))
            elif not isinstance(cause, HTTPError):
                raise
            tries.again(cause)


def requested_wait(headers: Mapping[str, str]) -> float | None:
    """Parse the seconds that a server asks to wait, from its rate limit or Retry-After header."""
    try:
        limit = parse_ratelimit_headers(headers)
    except ValueError:  # numbers of more digits than Python reads
        limit = None
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*", headers.get("Retry-After", ""))
    seconds = limit.reset_in_seconds if limit and not limit.remaining else int(match[1]) if match else None
    return None if seconds is None else float(min(seconds, 1 << 62))


def hub_error(url: str, error: Exception) -> CheckpointError:
    """Build the error for a request that the Hub rejected."""
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
    fix = access if status in (None, 401, 403, 404) else "Check HF_ENDPOINT, proxies and firewalls."
    return CheckpointError(f"{name} on the Hub", got=got, expected="a file that can be read", fix=fix)
