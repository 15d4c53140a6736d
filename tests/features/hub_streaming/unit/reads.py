"""A file of random bytes on the Hub of `hub_server`, and reads of it."""

from __future__ import annotations

import os
from typing import Any

from tests.support.hub_server import HubServer
from tp_transformers.features.hub_streaming.remote_file import RemoteFile
from tp_transformers.features.hub_streaming.tries import resolve

CONTENT = bytes(os.urandom(300_000))


def remote(server: HubServer, **changes: Any) -> RemoteFile:
    url = f"{server.endpoint}/org/model/resolve/main/model.safetensors"
    found = resolve(url)
    assert found.etag is not None
    assert found.size is not None
    return RemoteFile(
        url, **{"name": "it", "size": found.size, "etag": found.etag, "location": found.location, **changes}
    )


def read(file: RemoteFile, offset: int, *lengths: int) -> list[bytes]:
    buffers = [bytearray(length) for length in lengths]
    file.read(offset, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]
