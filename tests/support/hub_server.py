"""A Hub on the loopback: serves folders as huggingface.co does, remembers every request, and fails when it is told to.

Weight files are redirected to another host name, with a signature in their URL, as the Hub's go to a CDN. To serve a
folder from a process of its own, whose first line of output is what HF_ENDPOINT has to be:

    python -m tests.support.hub_server --folder checkpoint --repository org/model --port 0
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

WEIGHTS = (".safetensors", ".bin")
"""Endings of the files that are redirected."""


@dataclass
class Faults:
    """What goes wrong; counts are of requests for bytes of weights, those of `error_every` for anything about them."""

    drop_every: int = 0
    """Every so many answers end in their middle, with their connection."""
    error_every: int = 0
    """Every so many requests are answered with `error_status`."""
    error_status: int = 503
    retry_after: str | None = None
    """The Retry-After header of those."""
    delay: float = 0.0
    """Seconds before every answer."""
    stall_every: int = 0
    """Every so many answers send nothing after half of their bytes, for `stall` seconds."""
    stall: float = 0.0
    gzip: str | None = None
    """Content-Encoding of answers whose bodies are compressed, whatever was asked for; "" compresses without a word."""
    longer: int = 0
    """Bytes that bodies are longer than their range, without a header of their length; negative for shorter."""
    ignore_range: bool = False
    """Answer 200 and the whole file to Range requests."""
    headers: dict[str, str | None] = field(default_factory=dict)
    """Headers of answers about bytes of weights that are others, or None for those that are lacking."""
    hub_headers: dict[str, str | None] = field(default_factory=dict)
    """The same for answers that say where weights are."""
    trickle: float = 0.0
    """Seconds before each byte of a body, or of all that `mangle` gives."""
    mangle: Callable[[bytes], bytes] | None = None
    """What becomes of all bytes of an answer about weights; the connection ends with it."""
    expire_after: int = 0
    """A signature is good for so many requests."""
    change_after: int = 0
    """After so many requests, files are others: they have another ETag."""
    refuse: dict[str, int] = field(default_factory=dict)
    """{file: status} of files whose bytes nobody gets."""


@dataclass
class Seen:
    """One request and what was answered."""

    method: str
    host: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
    """Bytes of the body."""

    @property
    def authorization(self) -> str | None:
        """The token that came with it, after "Bearer "."""
        return self.headers.get("authorization", self.headers.get("Authorization"))

    @property
    def is_weights(self) -> bool:
        """Whether it is for bytes of weights."""
        return self.method == "GET" and urlsplit(self.path).path.endswith(WEIGHTS)


class HubServer:
    """Serves `repositories`, {name: {revision: folder}}, from threads of this process. Use as a context manager."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1", other_name: str = "localhost") -> None:
        self.repositories: dict[str, dict[str, Path]] = {}
        self.tokens: dict[str, str] = {}
        """{repository: the token that it wants}."""
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.signatures: dict[str, int] = {}
        self.counter, self.signature_counter = itertools.count(1), itertools.count(1)
        self.weight_counter = itertools.count(1)
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server((host, port), handler)
        self.port = self._server.server_address[1]
        self.endpoint = f"http://{host}:{self.port}"
        """What HF_ENDPOINT has to be."""
        self.cdn = f"http://{other_name}:{self.port}/cdn"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def add(self, repository: str, folder: str | Path, *, token: str | None = None, revision: str = "main") -> None:
        """Serve `folder` as a revision of `repository`, to those who have the `token`."""
        self.repositories.setdefault(repository, {})[revision] = Path(folder)
        if token is not None:
            self.tokens[repository] = token

    def forget(self) -> None:
        """Be without faults and without memory of requests."""
        self.faults, self.seen, self.signatures = Faults(), [], {}
        self.counter, self.weight_counter = itertools.count(1), itertools.count(1)

    def weights_sent(self) -> int:
        """Bytes of weight files that have been sent."""
        with self.lock:
            return sum(seen.sent for seen in self.seen if seen.is_weights)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that have gone are no fault of the server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    seen: Seen

    def do_HEAD(self) -> None:
        self._answer_all()

    def do_GET(self) -> None:
        self._answer_all()

    def _answer_all(self) -> None:
        """Answer, with what the faults make of it."""
        if self.hub.faults.mangle is None or ".safetensors" not in self.path:
            return self._answer()
        stream, self.wfile = self.wfile, io.BytesIO()
        try:
            self._answer()
        finally:
            content, self.wfile = self.wfile.getvalue(), stream
        self.close_connection = True
        content = self.hub.faults.mangle(content)
        with suppress(OSError):  # the other side has gone
            while content and self.hub.faults.trickle:
                stream.write(content[:1])
                content = content[1:]
                time.sleep(self.hub.faults.trickle)
            stream.write(content)
        return None

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        hub = self.hub
        self.seen = Seen(self.command, self.headers["Host"].partition(":")[0], self.path, dict(self.headers.items()))
        with hub.lock:
            hub.seen.append(self.seen)
            number = next(hub.counter) if re.search(r"\.safetensors", self.path) else 0
        time.sleep(hub.faults.delay)
        if number and hub.faults.error_every and number % hub.faults.error_every == 0:
            after = {"Retry-After": hub.faults.retry_after} if hub.faults.retry_after else {}
            return self._say(hub.faults.error_status, after)
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(/.*)?", path):
            return self._api(found[1], found[2], found[3] or "main")
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            return self._cdn(found[1], found[2], found[3])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], found[2], found[3])
        return self._say(404, {"X-Error-Code": "EntryNotFound"})

    def _folder(self, repository: str, revision: str) -> tuple[Path, str] | None:
        """The folder of a revision and its commit; answers where there is none."""
        revisions = self.hub.repositories.get(repository)
        wanted = self.hub.tokens.get(repository)
        if revisions is None:
            self._say(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif wanted is not None and self.headers.get("Authorization") != f"Bearer {wanted}":
            self._say(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"})
        else:
            for name, folder in revisions.items():
                if revision in (name, commit_of(repository, name)):
                    return folder, commit_of(repository, name)
            self._say(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return None

    def _api(self, repository: str, what: str | None, revision: str) -> None:
        if (found := self._folder(repository, revision)) is None:
            return
        folder, commit = found
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in files}
        if what == "tree":
            entries: Any = [
                {"type": "file", "oid": _etag(path), "size": path.stat().st_size, "path": name}
                | (
                    {"lfs": {"oid": _etag(path), "size": path.stat().st_size, "pointerSize": 130}}
                    if _is_lfs(name)
                    else {}
                )
                for name, path in names.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in names]
            entries = {"_id": commit, "id": repository, "sha": commit, "siblings": siblings, "private": False}
        self._say(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _resolve(self, repository: str, revision: str, file: str) -> None:
        if (found := self._folder(repository, revision)) is None:
            return
        folder, commit = found
        path, told = folder / file, {"X-Repo-Commit": commit}
        if not path.is_file():
            return self._say(404, {**told, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        if not _is_lfs(file):
            return self._say(200, {**told, "ETag": f'"{_etag(path)}"'}, path.read_bytes())
        signature = f"s{next(self.hub.signature_counter)}"
        self.hub.signatures[signature] = 0
        location = f"{self.hub.cdn}/{repository}/{commit}/{quote(file)}?signature={signature}"
        linked = {"X-Linked-ETag": f'"{_etag(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        return self._say(302, {**told, **linked, "ETag": f'"{commit}"', "Location": location})

    def _cdn(self, repository: str, commit: str, file: str) -> None:
        hub, faults = self.hub, self.hub.faults
        signature = parse_qs(urlsplit(self.path).query).get("signature", [""])[0]
        with hub.lock:
            number = next(hub.weight_counter) if self.command == "GET" else 0
            used = hub.signatures[signature] = hub.signatures.get(signature, 1 << 30) + 1
        if used > (faults.expire_after or 1 << 30):
            return self._say(403, {"Content-Type": "application/xml"}, b"<Error>Request has expired</Error>")
        if file in faults.refuse:
            return self._say(faults.refuse[file])
        revisions = hub.repositories[repository]
        path = next(folder for name, folder in revisions.items() if commit_of(repository, name) == commit) / file
        size = path.stat().st_size
        changed = faults.change_after and number > faults.change_after
        headers = {"ETag": f'"cdn-{_etag(path)}{"-changed" if changed else ""}"', "Accept-Ranges": "bytes"}
        start, stop, status = 0, size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and not faults.ignore_range:
            start, stop, status = int(wanted[1]), min(int(wanted[2] or size - 1) + 1, size), 206
            if start >= size:
                return self._say(416, {"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if faults.gzip is not None and self.command == "GET":
            body = gzip.compress(path.read_bytes()[start:stop])
            encoding = {"Content-Encoding": faults.gzip} if faults.gzip else {}
            return self._say(status, {**headers, **encoding}, body)
        if faults.longer and self.command == "GET":
            body = (path.read_bytes()[start:stop] + bytes(abs(faults.longer)))[: stop - start + faults.longer]
            self._head(status, {**headers, "Transfer-Encoding": "chunked"})
            for part in (body[:10], body[10:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return None
        self._head(status, {**headers, "Content-Length": str(stop - start)})
        if self.command == "HEAD":
            return None
        half = start + (stop - start) // 2
        stalls = faults.stall_every and number % faults.stall_every == 0
        drops = faults.drop_every and number % faults.drop_every == 0
        with path.open("rb") as stream:
            try:
                if stalls or drops:
                    self._send(stream, start, half)
                    start = half
                if stalls:
                    time.sleep(faults.stall)
                if drops:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self._send(stream, start, stop)
            except OSError:  # the other side has gone
                self.close_connection = True
        return None

    def _send(self, stream: Any, start: int, stop: int) -> None:
        self.wfile.flush()
        if isinstance(self.wfile, io.BytesIO):
            stream.seek(start)
            start += self.wfile.write(stream.read(stop - start))
        while start < stop and self.hub.faults.trickle:
            stream.seek(start)
            time.sleep(self.hub.faults.trickle)
            start += self.wfile.write(stream.read(1))
        while start < stop:
            count = self.connection.sendfile(stream, start, min(stop - start, 1 << 20))
            start += count
            with self.hub.lock:
                self.seen.sent += count

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.seen.status = status
        self.send_response(status)
        faults, changes = self.hub.faults, {}
        if re.search(r"\.safetensors", self.path):
            changes = faults.headers if self.path.startswith("/cdn/") else faults.hub_headers
        for name, value in {**headers, **changes}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _say(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self._head(status, {**(headers or {}), "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)
            with self.hub.lock:
                self.seen.sent += len(body)


def commit_of(repository: str, revision: str) -> str:
    """The commit that a revision is."""
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


def _is_lfs(file: str) -> bool:
    return file.endswith(WEIGHTS)


def _etag(path: Path) -> str:
    stat = path.stat()
    return hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()


def main() -> None:
    """Serve until the standard input ends, or the process is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--repository", default="org/model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--other-name", default="localhost", help="the same host, in the URLs of weight files")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every answer")
    arguments = parser.parse_args()
    with HubServer(arguments.port, arguments.host, arguments.other_name) as server:
        server.add(arguments.repository, arguments.folder)
        server.faults.delay = arguments.delay
        print(server.endpoint, flush=True)
        sys.stdin.read()
        print(json.dumps({"requests": len(server.seen), "weight_bytes": server.weights_sent()}), flush=True)


if __name__ == "__main__":
    main()
