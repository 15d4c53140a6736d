"""A file of random bytes on the Hub of `hub_server`, and reads of it."""

import os
from typing import Any

from tests.support.hub_server import HubServer
from tp_transformers.features.hub_streaming.hub import Weights
from tp_transformers.features.hub_streaming.remote_file import RemoteFile
from tp_transformers.features.hub_streaming.tries import resolve

CONTENT = bytes(os.urandom(300_000))


def url(server: HubServer, name: str = "org/model/resolve/main/model.safetensors") -> str:
    return f"{server.endpoint}/{name}"


def ranges(server: HubServer) -> list[str]:
    """The ranges of weights that were asked for."""
    return [seen.headers["Range"] for seen in server.seen if seen.is_weights]


def weights() -> Weights:
    """org/model on the Hub."""
    named = {"pretrained_model_name_or_path": "org/model", "variant": None, "use_safetensors": None}
    return Weights(named, {"revision": "main"})


def remote(server: HubServer, **changes: Any) -> RemoteFile:
    found = resolve(url(server))
    assert found.etag is not None
    assert found.size is not None
    known = {"name": "it", "size": found.size, "etag": found.etag, "location": found.location}
    return RemoteFile(url(server), **known | changes)


def read(file: RemoteFile, offset: int, *lengths: int) -> list[bytes]:
    buffers = [bytearray(length) for length in lengths]
    file.read(offset, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]
