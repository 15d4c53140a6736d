"""Mutated HTTP answers: what is read is the file as it is on the server's disk, or reading is one error of ours."""

import random
import re
import threading
import time
from typing import Any

from huggingface_hub import constants

from tests.features.hub_streaming.unit.reads import CONTENT, url, weights
from tests.support.fuzz import fuzz_cases, kept
from tp_transformers import TensorParallelError
from tp_transformers.features.hub_streaming import tries
from tp_transformers.features.hub_streaming.hub import Weights, _inquire

COUNT = 60
"""Loads of the file."""
LONGEST = 30.0
"""Seconds that one load may take; it takes a tenth of one on a machine that does nothing else."""

STATUSES = [*range(200, 209), *range(300, 309), 400, 401, 403, 404, 408, 410, 412, 416, 418, 425, 429, 500, 503, 599]
VALUES = [
    *("", " ", "0", "-1", "1e3", "0x10", "1_0", "\u0663", "9" * 19, "9" * 5000, "1, 1", "NaN", "*", "\x00", "\x80\xff"),
    *("gzip", "identity", "br, gzip", "chunked", "gzip, chunked", "close", "keep-alive", "100-continue"),
    *("bytes", "bytes 0-0/1", "bytes 5-4/9", "bytes */9", "bytes 0-999999/*", 'W/"a"', '"b"', "//", "/", "?", "#", "x"),
    *["file:///etc/passwd", "ftp://a/b", "http://", "http://[", "http://a:b/", "http://a:99999/", "http://é.é/"],
    *["http://127.0.0.1:9/", "javascript:x", "data:,x", "http://a@b:c@d/", '"api";r=0;t=99999999'],
    "http://" + "a" * 300,
]
NAMES = [
    *("Content-Length", "Content-Range", "Content-Encoding", "Transfer-Encoding", "Content-Type", "Connection", "ETag"),
    *("Location", "Retry-After", "ratelimit", "X-Linked-Size", "X-Linked-ETag", "X-Repo-Commit", "X-Error-Code"),
    "X-Xet",
]


def mutated(answer: bytes, rng: random.Random) -> bytes:
    """The answer with another status, other headers, or a body of another length."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    way = rng.randrange(9)
    if way == 0:  # another status
        lines[0] = b"HTTP/1.1 %d So" % rng.choice(STATUSES)
    if way == 1:  # no status line
        lines[0] = rng.choice([b"", b"HTTP/9 200", b"HTTP/1.1 -1 x", b"HTTP/1.0 206 x", b"HTTP/1.1 206", b"\xff" * 9])
    if way in (2, 3):  # a header's value
        index = rng.randrange(1, len(lines))
        value = rng.choice(VALUES).encode("utf-8" if rng.random() < 0.5 else "latin-1", "replace")
        lines[index] = lines[index].partition(b":")[0] + b": " + value
    if way == 4:  # a header more, or twice
        value = rng.choice(VALUES).encode("utf-8")
        lines.append(rng.choice(NAMES).encode() + b": " + value)
    if way == 5 and len(lines) > 1:  # a header less, or broken
        index = rng.randrange(1, len(lines))
        lines[index : index + 1] = rng.choice([[], [b"no colon"], [b": no name"], [lines[index], b" folded"]])
    if way == 6:  # a number of the headers
        index = rng.randrange(1, len(lines))
        lines[index] = re.sub(
            rb"\d+", lambda found: b"%d" % (int(found[0]) + rng.choice([-1, 1, 10])), lines[index], count=1
        )
    if way == 7:  # another length
        body = body[: rng.randrange(len(body) + 1)] if rng.random() < 0.5 else body + rng.randbytes(rng.randint(1, 99))
    whole = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if way == 8:  # another end of it all, or another start
        whole = rng.choice(
            [whole[: rng.randrange(len(head) + 4)], b"HTTP/1.1 100 Go on\r\n\r\n" * 3 + whole, b"\r\n" + whole]
        )
    return whole


def test_mutated_answers(server, monkeypatch) -> None:
    for name, value in {"TRIES": 3, "FIRST_WAIT": 0.001, "LONGEST_RETRY_AFTER": 0.05, "ANSWER_SECONDS": 1.0}.items():
        monkeypatch.setattr(tries, name, value)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, name, 2.0)
    monkeypatch.setattr(Weights, "url", lambda self, file: url(server))
    model = weights()
    read = failed = 0
    for case in fuzz_cases(0, COUNT, lambda rng: rng.randbytes(8)):
        rng, lock = random.Random(case.content), threading.Lock()
        faulty, seen = rng.randint(1, 3), 0
        where = rng.choice([0, 1, 2, 3])

        def mangle(answer: bytes, rng: Any = rng, lock: Any = lock, faulty: int = faulty, where: int = where) -> bytes:
            nonlocal seen
            with lock:
                seen += 1
                return mutated(answer, rng) if where < seen <= where + faulty else answer

        server.forget()
        server.faults.mangle = mangle
        with kept(case):
            began, says = time.monotonic(), ""
            try:
                found = _inquire(model, "model.safetensors")
                content = model.open("model.safetensors", **found).read_bytes(0, len(CONTENT))
            except TensorParallelError as error:
                says = str(error)
            else:
                assert content == CONTENT
            assert says.isprintable()
            assert len(says) < 1500
            assert time.monotonic() - began < LONGEST
        read, failed = read + (not says), failed + bool(says)
    assert min(read, failed) >= (read + failed) // 10, (read, failed)
