"""Files that are read by ranges, from a server that fails in all ways."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from tests.features.hub_streaming.unit.reads import CONTENT, ranges, read, remote, url
from tests.support.hub_server import Faults, commit_of
from tests.support.waiting import until
from tp_transformers import CheckpointError
from tp_transformers.features.hub_streaming import tries
from tp_transformers.features.hub_streaming.tries import resolve


def test_what_a_hub_says(server) -> None:
    found = resolve(url(server))
    assert found.commit_hash == commit_of("org/model", "main")
    assert found.size == len(CONTENT)
    assert found.location.startswith("http://localhost:")
    for name, error, says in (
        ("org/model/resolve/main/other.safetensors", EntryNotFoundError, "404"),
        ("org/other/resolve/main/model.safetensors", CheckpointError, "no such repository"),
        ("org/model/resolve/v9/model.safetensors", CheckpointError, "no such revision"),
    ):
        with pytest.raises(error, match=says):
            resolve(url(server, name))


def test_one_range_fills_buffers_one_after_the_other(server) -> None:
    file = remote(server)
    assert read(file, 1000, 10, 0, 70_000, 1) == [CONTENT[1000:1010], b"", CONTENT[1010:71_010], CONTENT[71_010:71_011]]
    assert ranges(server) == ["bytes=1000-71010"]
    assert (file.bytes_read, file.reads) == (70_011, 1)


def test_what_is_known_of_the_start_is_not_asked_for(server) -> None:
    file = remote(server, head=CONTENT[:100])
    assert read(file, 20, 30, 50) == [CONTENT[20:50], CONTENT[50:100]]
    assert not ranges(server)
    assert read(file, 90, 5, 20) == [CONTENT[90:95], CONTENT[95:115]]
    assert ranges(server) == ["bytes=100-114"]
    assert read(file, 100, 7) == [CONTENT[100:107]]


def test_a_broken_answer_is_taken_up_where_it_broke(server) -> None:
    server.faults.drop_every = 2
    file = remote(server)
    for _ in range(4):
        assert read(file, 0, len(CONTENT)) == [CONTENT]
    assert "bytes=150000-299999" in ranges(server)
    assert file.bytes_read == 4 * len(CONTENT), "no byte is read twice"


def test_threads_read_at_once(server, monkeypatch) -> None:
    monkeypatch.setattr(tries, "TRIES", 30)  # half of all requests fail, in any order
    server.faults.error_every, server.faults.drop_every, server.faults.expire_after = 7, 5, 9
    file = remote(server)
    with ThreadPoolExecutor(6) as executor:
        found = list(executor.map(lambda start: read(file, start, 5000)[0], range(0, len(CONTENT), 5000)))
    assert b"".join(found) == CONTENT
    assert file.bytes_read == len(CONTENT)


@pytest.mark.parametrize(
    ("faults", "changes", "says"),
    [
        ({"ignore_range": True}, {}, "got the full file in answer to a Range request"),
        ({}, {"size": len(CONTENT) + 1}, f"got {len(CONTENT)} bytes, expected {len(CONTENT) + 1} bytes"),
        ({"change_after": 1}, {}, "ETag"),
        ({"error_every": 1}, {}, "got status 503 in 6 tries"),
        ({"drop_every": 1, "refuse": {"model.safetensors": 502}}, {}, "got status 502 in 6 tries"),
        ({"refuse": {"model.safetensors": 403}}, {}, "got status 403 from localhost in 6 tries"),
        ({"refuse": {"model.safetensors": 412}}, {}, "changed"),
        (
            {"refuse": {"model.safetensors": 429}, "headers": {"ratelimit": f'"api";r=0;t={"9" * 5000}'}},
            {},
            "got status 429 in 6 tries",
        ),
        ({"refuse": {"model.safetensors": 418}}, {}, "got status 418"),
        ({"gzip": "gzip"}, {}, "got Content-Encoding gzip, expected the bytes as they are"),
        ({"gzip": ""}, {}, "got a body of 1023 bytes, expected 1000"),
        ({"longer": 1}, {}, "got a body of more than 1000 bytes, expected 1000"),
        ({"longer": -1}, {}, "got a body of 999 bytes, expected 1000"),
        ({}, {"location": "http://127.0.0.1:9/nothing"}, "got ConnectError: "),
    ],
)
def test_what_does_not_pass_is_one_error(server, faults, changes, says) -> None:
    file = remote(server, **changes)
    server.faults = Faults(**faults)
    with pytest.raises(CheckpointError, match=r"^checkpoint file it: ") as caught:
        read(file, 10, 1000), read(file, 10, 1000)
    assert says in str(caught.value)


def test_plain_bytes_are_asked_for_and_may_be_called_so(server) -> None:
    server.faults.headers = server.faults.hub_headers = {"Content-Encoding": "Identity"}
    assert read(remote(server), 10, 1000) == [CONTENT[10:1010]]
    (seen,) = [seen for seen in server.seen if seen.is_weights]
    assert seen.headers["Accept-Encoding"] == "identity"


def test_a_file_that_is_another_after_its_url_expired(server) -> None:
    file = remote(server, etag="another")
    server.faults.expire_after = 1
    assert read(file, 0, 10) == [CONTENT[:10]]
    with pytest.raises(CheckpointError, match="expected ETag another"):
        read(file, 0, 10)


def test_an_etag_of_any_text_is_told_in_a_short_line(server) -> None:
    file = remote(server, etags={f"http://localhost:{server.port}": "\n\x1b[2J" * 2000})
    with pytest.raises(CheckpointError, match="The file changed while it was read") as caught:
        read(file, 0, 10)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


def test_etags_of_one_host_are_the_same_for_all_who_ask(server) -> None:
    first = remote(server)
    read(first, 0, 10)
    assert list(first.etags) == [f"http://localhost:{server.port}"]
    server.faults.change_after = 1
    with pytest.raises(CheckpointError, match="The file changed"):
        read(remote(server, etags=first.etags), 0, 10)


def test_a_server_says_how_long_to_wait(server) -> None:
    file = remote(server)
    server.faults.error_every, server.faults.error_status, server.faults.retry_after = 2, 429, "1"
    started = time.monotonic()
    read(file, 0, 10)
    read(file, 0, 10)
    assert time.monotonic() - started > 1


@pytest.mark.parametrize("retry_after", ["²", "9" * 5000, "-1", "soon"])
def test_nonsense_of_how_long_to_wait_is_left_alone(server, retry_after, monkeypatch) -> None:
    monkeypatch.setattr(tries, "FIRST_WAIT", 0.01)
    file = remote(server)
    server.faults.error_every, server.faults.error_status, server.faults.retry_after = 2, 429, retry_after
    assert [read(file, 0, 10), read(file, 0, 10)] == [[CONTENT[:10]]] * 2


def test_a_stalled_answer_is_given_up(server, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    server.faults.stall_every, server.faults.stall = 2, 5.0
    file = remote(server)
    for _ in range(2):
        assert read(file, 0, len(CONTENT)) == [CONTENT]


def test_closing_ends_reads_that_wait(server, monkeypatch) -> None:
    monkeypatch.setattr(tries, "FIRST_WAIT", 60.0)
    monkeypatch.setattr(tries, "LONGEST_WAIT", 60.0)
    file = remote(server)
    server.faults.error_every = 1
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read, file, 0, 10)
        until(lambda: any(seen.status == 503 for seen in server.seen))
        file.close()
        assert isinstance(reading.exception(30), CheckpointError)
    count = len(server.seen)
    with pytest.raises(CheckpointError, match="closed"):
        read(file, 0, 10)
    assert len(server.seen) == count


def test_the_token_goes_to_the_hub_alone(server) -> None:
    file = remote(server, token="hf_secret")
    server.faults.expire_after = 1
    read(file, 0, 10)
    read(file, 0, 10)
    sent = {(seen.host, seen.authorization) for seen in server.seen}
    assert sent == {("127.0.0.1", None), ("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}
