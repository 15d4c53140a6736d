"""GGUF files against the reader and the decoders of the package `gguf`."""

from __future__ import annotations

import random
import struct
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits

from tests.support.fuzz import fuzz_cases, kept
from tests.support.gguf_files import random_blocks
from tp_transformers import CheckpointError, UnsupportedError
from tp_transformers.features.gguf.blocks import Gguf
from tp_transformers.features.gguf.storage import GgufCheckpoint
from tp_transformers.features.quantized.bundle import Decoded

COUNT = 300
"""Files a seed."""
ROWS, COLUMNS = 5, 1024
KINDS = sorted(kind.name for kind in _type_traits if kind.name != "BF16")


def write(path: Path, kinds: list[str]) -> None:
    """A file with a tensor of random blocks of each kind, and two that are no blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    for kind in kinds:
        writer.add_tensor(
            kind, random_blocks(GGMLQuantizationType[kind], (ROWS, COLUMNS)), raw_dtype=GGMLQuantizationType[kind]
        )
    writer.add_tensor("norm", torch.arange(8.0).numpy())
    writer.add_tensor("half", torch.arange(6.0).view(2, 3).half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every kind of blocks that the package decodes."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, KINDS)
    return path


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
"""Random blocks have scales that are infinite or no numbers."""


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_any_slice_is_that_of_the_decoded_tensor(path) -> None:
    stored = gguf.GGUFReader(path).tensors
    expected = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in stored}
    rng = random.Random(0)
    with GgufCheckpoint([path]) as checkpoint:
        tensors = Gguf().dequantized(checkpoint.tensors)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            full = torch.from_numpy(expected[name].copy())
            assert_equal(tensor.materialize().float(), full)
            for _ in range(5):
                first, last = sorted(rng.sample(range(full.shape[-1] + 1), 2))
                part = tensor.select(full.ndim - 1, [(first, last)])
                assert_equal(part.materialize().float(), full[..., first:last])
    assert len(tensors) == len(KINDS) + 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_integers_and_scales_are_those_of_the_decoded_tensor(path, kind) -> None:
    with GgufCheckpoint([path]) as checkpoint:
        bundle = Gguf().dequantized(checkpoint.tensors)[kind]
        values = torch.empty(ROWS, COLUMNS)
        for step, view in bundle.read_steps(values):
            if isinstance(step, Decoded):
                decoded = step
            else:
                view.copy_(step.materialize())
    affine = bundle.decode
    integers = affine.integers(decoded.stored, values.shape).float().view(ROWS, -1, 32)
    scales, zeros = affine.scales(decoded.stored, values.shape)
    scales, zeros = scales[..., None], zeros[..., None] if isinstance(zeros, torch.Tensor) else zeros
    found = integers * scales + zeros if affine.adds else (integers - zeros) * scales
    decoded.fill(values)
    assert torch.equal(found.view_as(values), values)


def test_a_type_that_the_package_does_not_know_is_refused(path, tmp_path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b"Q4_0") + 4 + 4 + 2 * 8  # its name, number of dims, dims
    assert struct.unpack_from("<I", content, place) == (GGMLQuantizationType.Q4_0,)
    struct.pack_into("<I", content, place, 99)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnsupportedError, match="tensor Q4_0: got blocks of type 99"):
        GgufCheckpoint([tmp_path / "model.gguf"])


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The file with other bytes in its header, or another length."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(400)] = rng.choice([0, 1, 8, 9, 32, 255, rng.randrange(256)])
    return bytes(changed[: rng.randrange(len(changed))] if rng.randrange(5) == 0 else changed)


@pytest.mark.parametrize("seed", range(2))
def test_a_mutated_file_is_refused_or_read_as_by_the_package(seed, tmp_path) -> None:
    path = tmp_path / "model.gguf"
    write(path, ["Q4_0", "Q6_K"])
    content = path.read_bytes()
    refused = read = 0
    for case in fuzz_cases(seed, COUNT, lambda rng: mutated(content, rng)):
        with kept(case):
            path.write_bytes(case.content)
            try:
                with GgufCheckpoint([path]) as checkpoint:
                    seen = {name: tensor.materialize() for name, tensor in checkpoint.tensors.items()}
            except (CheckpointError, UnsupportedError):
                refused += 1
                continue
            read += 1
            try:
                tensors = gguf.GGUFReader(path).tensors
            except Exception:  # it is stricter with metadata, which is not used here
                continue
            for tensor in tensors:
                assert bytes(tensor.data) == seen[tensor.name].contiguous().view(torch.uint8).numpy().tobytes()
    assert refused
    assert read


def test_the_sizes_of_blocks_are_those_of_the_package(path) -> None:
    with GgufCheckpoint([path]) as checkpoint:
        for kind in KINDS:
            length, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            assert tuple(checkpoint.tensors[kind].shape) == (ROWS, COLUMNS // length * nbytes)
