"""Answers that are slow, late, malformed or from elsewhere: one error that names file and URL, and no bytes of them."""

import logging
import re
import threading
import time
from typing import Any

import pytest
from huggingface_hub import constants

from tests.features.hub_streaming.unit.reads import CONTENT, ranges, read, remote, url, weights
from tests.support.hub_server import HubServer
from tp_transformers import CheckpointError
from tp_transformers.features.hub_streaming import tries
from tp_transformers.features.hub_streaming.hub import Weights, _inquire_all
from tp_transformers.features.hub_streaming.tries import followed, resolve, shown, within


def fails(server: HubServer, **changes: Any) -> str:
    """The message of a read that fails; the file was found before."""
    file = changes.pop("file", None) or remote(server, **changes)
    with pytest.raises(CheckpointError, match=r"^checkpoint file it: got .*, expected .*\. .* URL: http") as caught:
        read(file, 10, 1000)
    assert "signature" not in str(caught.value)
    return str(caught.value)


# -- lengths, ranges and encodings


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Content-Encoding": "br"}, "got Content-Encoding br, expected the bytes as they are"),
        ({"Content-Encoding": "identity, gzip"}, "got Content-Encoding identity, gzip"),
        ({"Content-Length": "999"}, "got a body of 999 bytes, expected 1000"),
        ({"Content-Length": "1001"}, "got a body of 1001 bytes, expected 1000"),
        ({"Content-Length": "18446744073709551616"}, "got a body of 18446744073709551616 bytes"),
        ({"Content-Length": "-1"}, "ProtocolError: "),
        ({"Content-Length": "many"}, "ProtocolError: "),
        ({"Content-Length": "9" * 5000}, "ProtocolError: "),
        ({"Content-Range": None}, "got Content-Range None, expected bytes 10-1009 of 300000"),
        ({"Content-Range": "bytes 11-1009/300000"}, "got Content-Range 'bytes 11-1009/300000', expected bytes 10-1009"),
        ({"Content-Range": "bytes 10-1010/300000"}, "got Content-Range"),
        ({"Content-Range": "bytes 10-9/300000"}, "got Content-Range"),
        ({"Content-Range": "bytes -10-1009/300000"}, "got Content-Range"),
        ({"Content-Range": f"bytes 10-1009/{'9' * 5000}"}, "got Content-Range"),
        ({"Content-Range": "bytes 10-1009/300001"}, "got 300001 bytes, expected 300000 bytes"),
    ],
)
def test_headers_that_do_not_fit_the_range(server, headers, says) -> None:
    server.faults.headers = headers
    message = fails(server)
    assert says in message
    assert len(message) < 700


def test_a_range_that_comes_in_parts(server) -> None:
    def parts(answer: bytes) -> bytes:
        head, mark, body = answer.partition(b"\r\n\r\n")
        found = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Range")]
        start, stop = (int(number) for number in found[0].split()[-1].partition(b"/")[0].split(b"-"))
        head = head.replace(b"-%d/" % stop, b"-%d/" % min(stop, start + 99))
        return head.replace(b"Length: %d" % len(body), b"Length: %d" % len(body[:100])) + mark + body[:100]

    file = remote(server)
    server.faults.mangle = parts
    assert read(file, 10, 950) == [CONTENT[10:960]]


# -- redirects


@pytest.mark.parametrize(
    ("location", "says"),
    [
        (None, "got status 302 without Location, expected a redirect that says where to"),
        ("file:///etc/passwd", "got a redirect to file:///etc/passwd (the scheme 'file')"),
        ("ftp://user:word@host/x?key=word", "got a redirect to ftp://host/x (the scheme 'ftp')"),
        ("https:///x", "no host"),
        ("http://localhost:port/x", "'port'"),
        ("http://localhost:99999/x", "Port out of range"),
        ("http://[::1/x", "Invalid"),
        ("http://" + "a" * 300 + "/x", "URL that cannot be asked"),
    ],
)
@pytest.mark.parametrize("who", ["cdn", "hub"])
def test_redirects_that_lead_nowhere(server, location, says, who) -> None:
    if who == "cdn":
        file = remote(server)
        server.faults.refuse = {"model.safetensors": 302}
        server.faults.headers = {"Location": location}
        assert says in fails(server, file=file)
        return
    server.faults.hub_headers = {"Location": location}
    with pytest.raises(CheckpointError) as caught:
        read(remote(server), 10, 1000)
    assert "key=word" not in str(caught.value)
    assert f"127.0.0.1:{server.port}/org/model" in str(caught.value) or location == "http://" + "a" * 300 + "/x"


def test_redirects_in_a_circle(server) -> None:
    file = remote(server)
    server.faults.refuse = {"model.safetensors": 302}
    server.faults.headers = {"Location": "model.safetensors?" + file.location.partition("?")[2]}
    message = fails(server, file=file)
    assert "got 6 redirects one after the other, the last to http://localhost:" in message
    assert len(ranges(server)) == 6


def test_redirects_that_are_relative(server) -> None:
    file = remote(server)
    location = file.location.partition("//")[2].partition("/")[2]
    server.faults.hub_headers = {"Location": f"//localhost:{server.port}/{location}"}
    file = remote(server, token="hf_secret")
    assert read(file, 10, 1000) == [CONTENT[10:1010]]
    assert not any(seen.authorization for seen in server.seen if seen.is_weights)
    assert followed("https://a/b/c?d", "e?f") == "https://a/b/e?f"
    assert shown("https://user:word@a:1/b\u00e9\n?key=word#x") == "https://a:1/b\\xe9\\n"


@pytest.mark.parametrize("size", ["-1", "9" * 30, "9" * 5000, "many"])
def test_sizes_that_are_none(server, size) -> None:
    server.faults.hub_headers = {"X-Linked-Size": size}
    with pytest.raises(CheckpointError, match=r"got (a size of|an answer without) .*Hugging Face Hub answers"):
        remote(server)


# -- time


def test_a_body_that_trickles_is_given_up(server, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tries, "PACE_SECONDS", 0.4)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    file = remote(server)
    monkeypatch.setattr(tries, "TRIES", 3)
    server.faults.trickle = 0.02
    began = time.monotonic()
    message = fails(server, file=file)
    assert time.monotonic() - began >= 3 * 0.4
    assert re.search(r"got \d+ bytes in \d s in 3 tries, expected at least 1\.0 kB a second\. ", message)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2
    assert "try 2 of 3 in 0 s. Interrupt the process (Ctrl-C) to stop. URL: http://localhost:" in lines[0]
    assert file.bytes_read < 200


def test_a_body_that_trickles_for_a_while_is_taken_up(server, monkeypatch) -> None:
    monkeypatch.setattr(tries, "PACE_SECONDS", 0.4)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    file = remote(server)
    server.faults.trickle = 0.02
    mend = threading.Timer(0.5, lambda: setattr(server.faults, "trickle", 0.0))
    mend.start()
    assert read(file, 10, 1000) == [CONTENT[10:1010]]
    mend.join()


def test_who_waits_longer_for_a_byte_waits_longer_for_bytes(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 120)
    now = [0.0]
    monkeypatch.setattr(tries, "monotonic", lambda: now[0])
    pace = tries.Pace()
    for now[0] in (31.0, 100.0):
        pace.count(1)
    now[0] = 121.0
    with pytest.raises(tries.StalledError, match="3 bytes in 121 s"):
        pace.count(1)
    pace.restart()
    now[0] = 242.0
    pace.count(30 << 10)


def test_headers_that_do_not_end_are_given_up(server, monkeypatch) -> None:
    file = remote(server)
    monkeypatch.setattr(tries, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(tries, "TRIES", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    late: list[int] = []
    with pytest.raises(tries.StalledError, match="no answer"):
        within(lambda: time.sleep(0.3) or 7, late=late.append)
    while not late:
        time.sleep(0.01)
    assert late == [7]
    with pytest.raises(TimeoutError, match="its own"):
        within(lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1.0)
    server.faults.mangle, server.faults.trickle = bytes, 0.02
    assert "got no answer in 1 s in 2 tries, expected an answer" in fails(server, file=file)


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "100000"}, {"ratelimit": '"api";r=0;t=100000'}, {"Retry-After": "100000", "ratelimit": "?"}],
)
def test_a_wait_that_is_too_long_is_not_begun(server, headers) -> None:
    file = remote(server)
    server.faults.refuse, server.faults.headers = {"model.safetensors": 429}, headers
    message = fails(server, file=file)
    wish = "the server's wish to wait 100000 s, after 0 s, expected waits of at most 300 s"
    assert f"got status 429 and {wish}" in message
    assert len(ranges(server)) == 1


def test_all_waits_together_are_bounded_and_told(server, monkeypatch, caplog) -> None:
    waits: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return False

    file = remote(server, closed=Clock())
    server.faults.refuse, server.faults.headers = {"model.safetensors": 503}, {"Retry-After": "250"}
    message = fails(server, file=file)
    assert "got status 503 and the server's wish to wait 250 s, after 500 s, expected waits of at most" in message
    assert [round(wait) for wait in waits] == [250, 250]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("checkpoint file it: status 503; try 2 of 6 in 250 s. Interrupt the process (Ctrl-C)")


def test_a_hub_that_asks_to_wait_too_long(server) -> None:
    server.faults.error_every, server.faults.error_status, server.faults.retry_after = 1, 429, "100000"
    with pytest.raises(CheckpointError, match=r"got status 429 and the server's wish to wait 100000 s"):
        resolve(url(server))


def test_one_of_several_files_that_is_found_stops_no_other(server, monkeypatch) -> None:
    """They share what stops their waits; the last one is answered after all others are done."""
    slow = threading.Event()

    def place(self: Weights, file: str) -> str:
        if file == "last" and not slow.is_set():
            slow.set()
            time.sleep(0.5)
        return url(server)

    monkeypatch.setattr(Weights, "url", place)
    found = _inquire_all(weights(), ["first", "second", "last"])
    assert [entry["head"][:100] for entry in found.values()] == [CONTENT[:100]] * 3
