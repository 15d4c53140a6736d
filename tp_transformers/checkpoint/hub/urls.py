"""URLs that servers give: where a redirect leads, which server a URL belongs to, and how an error shows it."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub.errors import HfHubHTTPError

# httpx or httpx2, as the installed huggingface_hub has it.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_httpx: Any = sys.modules[HTTPError.__module__.partition(".")[0]]

BAD_URL: tuple[type[Exception], ...] = (ValueError, _httpx.InvalidURL)
"""Errors of urllib, the socket module and httpx for text that is no URL or no host name."""

_SHOWN = 200
"""Most characters of a server's or a library's text in a message."""


def origin(url: str) -> str:
    """Scheme, host and port of a URL. Raises ValueError for a bad port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def shown(url: str) -> str:
    """The URL as an error may show it: without user, password, query and fragment, and in printable ASCII."""
    url = url.partition("?")[0].partition("#")[0]
    scheme, mark, rest = url.partition("//")
    host, slash, path = rest.partition("/")
    text = scheme + mark + host.rpartition("@")[2] + slash + path
    return printable(text)


def printable(text: str) -> str:
    """The first characters of the message of a server or a library, in ASCII and on one line."""
    return "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text[:_SHOWN])


def followed(url: str, location: str) -> str:
    """The absolute URL that a `Location` in an answer from `url` means, which may be relative.

    Raises ValueError, with the reason, for one that is not a URL of http or https.
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
