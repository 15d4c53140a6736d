"""Requests to the Hub that are made again after faults that pass: at once, after a wait, or when a server asks for it.

huggingface_hub's own `http_stream_backoff` neither resumes a body that breaks off, nor stops waiting when a file is
closed, nor limits the wait that a server may ask for.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import get_hf_file_metadata
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import HfFileMetadata
from huggingface_hub.utils import parse_ratelimit_headers

from ...errors import CheckpointError

TRIES = 6
"""Number of times that a request is made before its error is final; bytes that came in between start it anew."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0
"""Seconds before the second try, doubled for each one after it, up to the longest."""
LONGEST_RETRY_AFTER = 300.0
"""The most seconds that a server may make us wait by Retry-After or its rate limit headers."""
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

# httpx or httpx2, as the installed huggingface_hub has it.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]

T = TypeVar("T")


class TryAgainError(Exception):
    """A fault that another request may mend, `wait` seconds later: 0 for at once, None for when it seems best."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Tries:
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
        kind = "" if isinstance(error, TryAgainError) else f"{type(error).__name__}: "
        raise CheckpointError(
            self.subject,
            got=f"{kind}{error} in {self.count} tries",
            expected="an answer",
            fix="Check the network and HF_ENDPOINT, and load again.",
        ) from error


def resolve(url: str, token: str | bool | None = None, closed: threading.Event | None = None) -> HfFileMetadata:
    """Commit, ETag, size and location of the file at `url`, as the Hub gives them.

    Raises:
        EntryNotFoundError: where the repository has no such file.
        CheckpointError: where the Hub cannot be reached, refuses, or does not say what a Hub says.
    """
    metadata = ask_hub(url, partial(get_hf_file_metadata, url, token=token), closed)
    if metadata.commit_hash and metadata.etag and metadata.size is not None:
        return metadata
    raise CheckpointError(
        url,
        got="an answer without commit, ETag or size",
        expected="what the Hugging Face Hub answers",
        fix="Check HF_ENDPOINT, proxies and firewalls.",
    )


def ask_hub(url: str, question: Callable[[], T], closed: threading.Event | None = None) -> T:
    """The answer to a `question` that huggingface_hub asks, in as many tries as it takes; raises as `resolve`."""
    tries = Tries(url, closed or threading.Event())
    while True:
        try:
            return question()
        except EntryNotFoundError:
            raise
        except (HTTPError, OSError) as error:
            # transformers wraps what huggingface_hub raises.
            cause = error if isinstance(error, HTTPError) else error.__cause__
            if isinstance(cause, HfHubHTTPError):
                if cause.response.status_code not in TRANSIENT:
                    raise refused(url, cause) from error
                cause = TryAgainError(f"status {cause.response.status_code}", asked_wait(cause.response.headers))
            elif not isinstance(cause, HTTPError):
                raise
            tries.again(cause)


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, by its rate limit or Retry-After header."""
    limit = parse_ratelimit_headers(headers)
    asked = re.fullmatch(r"\s*(\d{1,9})\s*", headers.get("Retry-After", ""))
    seconds = limit.reset_in_seconds if limit and not limit.remaining else int(asked[1]) if asked else None
    return None if seconds is None else min(float(seconds), LONGEST_RETRY_AFTER)


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
    return CheckpointError(f"{name} on the Hub", got=got, expected="a file that can be read", fix=access)
