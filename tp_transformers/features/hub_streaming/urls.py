"""URLs sent by servers: resolving redirects, the origin of a URL, and printing one in an error."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub.errors import HfHubHTTPError

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
