"""Slices of what the table expresses against slices of what transformers' own converters give."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightConverter

from tests.support.tiers import sampled
from tests.unit.slices.test_lazy import ranges, select
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.conversion.operations import _BY_NAME, convert_lazily
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.slices.lazy import LazyTensor, Resident
from tp_transformers.slices.stored import Stored

TARGET = "model.a"
WIDTH = 16
"""Floats in a row that is worth a read of its own."""


class Model:
    """What operations ask a model for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.config = SimpleNamespace(
            num_attention_heads=2,
            vision_config=SimpleNamespace(num_attention_heads=3),
            parts=3,
            split_ngram_parts=3,
            unpadded_vocab_size=30,
            get_text_config=lambda: self.config,
        )
        self.shapes = shapes or {}

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta")


class Pool:
    """A file of random numbers, out of which tensors of any shape are cut one after the other."""

    def __init__(self, tensor: torch.Tensor, opened: Checkpoint) -> None:
        self.tensor, self.opened = tensor, opened
        self.whole = opened.tensors["pool"]
        self.position = 0

    def take(self, shape: tuple[int, ...]) -> tuple[Stored, torch.Tensor]:
        count = torch.Size(shape).numel()
        if self.position + count > len(self.tensor):
            self.position = 0
        start, self.position = self.position, self.position + count
        offset = self.whole.offset + start * 4
        stored = Stored(self.whole.source, offset=offset, shape=shape, dtype=torch.float32)
        return stored, self.tensor[start : start + count].view(shape)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    tensor = torch.randn(200_000)
    path = tmp_path_factory.mktemp("operations") / "model.safetensors"
    save_file({"pool": tensor}, path)
    with Checkpoint([path]) as opened:
        yield Pool(tensor, opened)


def operation(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operation of the installed transformers, where it has it and takes these arguments."""
    kind = getattr(core_model_loading, name, None)
    try:
        return kind and kind(*args, **kwargs)
    except TypeError:
        return None


def transformers_own(
    converter: WeightConverter, sources: list[tuple[str, str, torch.Tensor]], model: Model, target: str = TARGET
) -> dict[str, torch.Tensor]:
    """What transformers makes of tensors in memory."""
    converter = copy.deepcopy(converter)
    for name, pattern, tensor in sources:
        converter.add_tensor(target, name, pattern, tensor)
    values = converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def check(data: st.DataObject, pool: Pool, converted: dict[str, LazyTensor] | None, expected: Any) -> None:
    """The same tensors by the same names, and random slices of each that read no byte more than they are."""
    assert list(converted) == list(expected)
    for name, value in expected.items():
        lazy = converted[name]
        assert torch.equal(lazy.materialize(), value)
        for _ in range(data.draw(st.integers(1, 2), "slices")):
            dim = data.draw(st.integers(0, value.ndim - 1), "dim")
            chosen = data.draw(ranges(value.shape[dim]), "ranges")
            lazy, value = lazy.select(dim, chosen), select(value, dim, chosen)
        assert lazy.shape == value.shape
        assert torch.equal(lazy.materialize(), value)
        destination = torch.full(value.shape, torch.nan)
        before = pool.opened.bytes_read
        steps = list(lazy.read_steps(destination))
        read([Request(step, view) for step, view in steps if isinstance(step, Stored)])
        assert torch.equal(destination, value)
        assert pool.opened.bytes_read - before == value.numel() * 4


def shapes(ndim: int, low: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, 4), min_size=ndim, max_size=ndim).map(tuple)


Made = tuple[Any, list[str], list[str], dict[str, list[tuple[int, ...]]], dict[str, tuple[int, ...]]]
"""Operations, source patterns, target patterns, shapes of each pattern's tensors, shapes of the model's parameters."""


def merge(draw: st.DrawFn) -> Made:
    shape = draw(shapes(draw(st.integers(1, 3))))
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    return [operation("MergeModulelist", dim)], ["x"], ["a"], {"x": [shape] * draw(st.integers(1, 5))}, {}


def merge_and_concatenate(draw: st.DrawFn) -> Made:
    patterns = draw(st.permutations(["x", "y", "z"]))[: draw(st.integers(2, 3))]
    shape = list(draw(shapes(2)))
    stack, join = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    count = draw(st.integers(1, 4))
    tensors = {}
    for pattern in draw(st.permutations(patterns)):  # collected in another order than joined
        if stack != join:
            shape[join - (join > stack)] = draw(st.integers(1, 4))
            number = count
        else:
            number = draw(st.integers(1, 4))
        tensors[pattern] = [tuple(shape)] * number
    operations = [operation("MergeModulelist", stack), operation("Concatenate", join)]
    return operations, patterns, ["a"], tensors, {}


def concatenate(draw: st.DrawFn) -> Made:
    patterns = draw(st.permutations(["x", "y", "z"]))[: draw(st.integers(1, 3))]
    shape = list(draw(shapes(draw(st.integers(1, 3)))))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    tensors: dict[str, list[tuple[int, ...]]] = {}
    for pattern in draw(st.permutations(patterns)):
        for _ in range(draw(st.integers(1, 3))):
            shape[dim] = draw(st.integers(1, 4))
            tensors.setdefault(pattern, []).append(tuple(shape))
    return [operation("Concatenate", dim)], patterns, ["a"], tensors, {}


def chunk(draw: st.DrawFn) -> Made:
    targets = ["a", "b", "c"][: draw(st.integers(2, 3))]
    shape = list(draw(shapes(draw(st.integers(1, 3)))))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = len(targets) * draw(st.integers(1, 3)) - draw(st.integers(0, 1))  # torch.chunk takes any length
    return [operation("Chunk", dim)], ["x"], targets, {"x": [tuple(shape)]}, {}


def split(draw: st.DrawFn) -> Made:
    targets = ["a", "b", "c"][: draw(st.integers(2, 3))]
    shape = list(draw(shapes(draw(st.integers(1, 3)))))
    dim = draw(st.integers(0, len(shape) - 1))
    parameters = {}
    for target in targets:
        shape[dim] = draw(st.integers(1, 4))
        parameters[f"model.{target}"] = tuple(shape)
    shape[dim] = sum(part[dim] for part in parameters.values())
    return [operation("Split", dim)], ["x"], targets, {"x": [tuple(shape)]}, parameters


def split_modulelist(draw: st.DrawFn) -> Made:
    # Up to 5.17, transformers drops all dims of length 1, not only the one that it splits.
    shape = draw(shapes(draw(st.integers(2, 3)), low=2))
    return [operation("SplitModulelist", draw(st.integers(-2, 1)))], ["x"], ["a.*"], {"x": [shape]}, {}


def transpose(draw: st.DrawFn) -> Made:
    shape = draw(shapes(draw(st.integers(2, 3))))
    first, second = draw(st.integers(-2, 1)), draw(st.integers(-2, 1))
    asked, checks = list(shape), draw(st.booleans())
    if draw(st.booleans()):
        asked[first], asked[second] = asked[second], asked[first]
    return [operation("Transpose", first, second, checks)], ["x"], ["a"], {"x": [shape]}, {TARGET: tuple(asked)}


def transpose_and_chunk(draw: st.DrawFn) -> Made:
    shape = (draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3)))
    return [operation("Transpose", 0, 1), operation("Chunk", 0)], ["x"], ["a", "b"], {"x": [shape]}, {}


def unpad_vocabulary(draw: st.DrawFn) -> Made:
    shape = (30 + draw(st.integers(0, 5)), WIDTH)
    return [operation("Inkling2UnpadVocab")], ["x"], ["a"], {"x": [shape]}, {TARGET: (30, WIDTH)}


def interleave(draw: st.DrawFn) -> Made:
    shape = [*draw(shapes(draw(st.integers(1, 2)))), WIDTH]
    dim = draw(st.integers(0, len(shape) - 2))
    shape[dim] *= 2
    operations = [operation("Interleave", dim, inverse=draw(st.booleans()))]
    if draw(st.booleans()):
        return [*operations, operation("Chunk", dim)], ["x"], ["a", "b"], {"x": [tuple(shape)]}, {}
    return operations, ["x"], ["a"], {"x": [tuple(shape)]}, {}


def permute_for_rope(draw: st.DrawFn) -> Made:
    key = draw(st.sampled_from([None, "vision_config"]))
    heads = 2 if key is None else 3
    shape = (heads * 2 * draw(st.integers(1, 4)), WIDTH)
    names = ["x", "a"]  # 5.17 looks for the source's name only
    operations = [operation("PermuteForRope", key, names, draw(st.booleans()))]
    return operations, ["x"], ["a"] if hasattr(operations[0], "get_target_pattern") else ["x"], {"x": [shape]}, {}


def chunk_and_permute(draw: st.DrawFn) -> Made:
    shape = (3 * 4 * draw(st.integers(1, 3)), WIDTH)
    operations = [operation("Chunk", 0), operation("PermuteForRope", None, ["a", "b"])]
    return operations, ["x"], ["a", "b", "c"], {"x": [shape]}, {}


def fuse_experts(draw: st.DrawFn) -> Made:
    patterns = draw(st.permutations(["x", "y"]))[: draw(st.integers(1, 2))]
    shape = draw(shapes(2))
    count = 2 * draw(st.integers(1, 3)) - draw(st.integers(0, 1))
    assume(count > 1)
    tensors = {pattern: [shape] * count for pattern in draw(st.permutations(patterns))}
    operations = [operation("ErnieFuseAndSplitTextVisionExperts", 0, draw(st.integers(0, 2)))]
    return operations, patterns, ["a", "b"], tensors, {}


KINDS = {
    "Chunk": chunk,
    "Concatenate": concatenate,
    "ErnieFuseAndSplitTextVisionExperts": fuse_experts,
    "Inkling2UnpadVocab": unpad_vocabulary,
    "Interleave": interleave,
    "MergeModulelist": merge,
    "PermuteForRope": permute_for_rope,
    "Split": split,
    "SplitModulelist": split_modulelist,
    "Transpose": transpose,
    "chain: merge, concatenate": merge_and_concatenate,
    "chain: transpose, chunk": transpose_and_chunk,
    "chain: chunk, permute": chunk_and_permute,
}


def test_every_operation_of_the_table_is_tested() -> None:
    assert {kind for kind in KINDS if not kind.startswith("chain")} == set(_BY_NAME)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_slices_are_slices_of_what_transformers_converts(pool, kind, data) -> None:
    operations, patterns, targets, tensors, parameters = data.draw(st.composite(KINDS[kind])(), "converter")
    if None in operations:
        pytest.skip("not in this transformers")
    model = Model(parameters)
    converter = WeightConverter(patterns, targets, operations)
    lazies, reals = [], []
    for pattern, pattern_shapes in tensors.items():
        for index, shape in enumerate(pattern_shapes):
            stored, real = pool.take(shape)
            lazies.append((f"{pattern}.{index}", pattern, stored))
            reals.append((f"{pattern}.{index}", pattern, real))
    check(data, pool, convert_lazily(converter, TARGET, lazies, model), transformers_own(converter, reals, model))


def registered() -> dict[str, WeightConverter]:
    """Every kind of converter that the installed transformers has for a model type, by name of the first such type."""
    conversion_mapping.get_checkpoint_conversion_mapping("")  # fills the cache
    found: dict[tuple[object, ...], tuple[str, WeightConverter]] = {}
    for model_type, transforms in conversion_mapping._checkpoint_conversion_mapping_cache.items():
        for entry in transforms:
            if isinstance(entry, WeightConverter):
                operations = str(
                    [(type(step).__name__, sorted(vars(step).items(), key=str)) for step in entry.operations]
                )
                key = (operations, len(entry.source_patterns), len(entry.target_patterns))
                found.setdefault(key, (f"{model_type}: {entry}", entry))
    return dict(found.values())


NOT_EXPRESSED = {
    "Inkling2LoopDequantizeExperts",  # computes values
    "Inkling2LoopMergeMessageQueries",  # a few rows, which are read whole
}
"""Operations whose complete sources are read."""


@pytest.mark.parametrize("name", sampled(registered(), 3))
@given(st.data())
@settings(max_examples=10)  # of one shape each
def test_every_converter_of_every_model_type_is_expressed(pool, name, data) -> None:
    converter = copy.deepcopy(registered()[name])
    # The patterns' names mean nothing here; the operations, their number and which names RoPE looks for do.
    sources = [f"s{index}" for index in range(len(converter.source_patterns))]
    looked_for = [names for step in converter.operations if (names := getattr(step, "permute_layer_names", None))]
    targets = [*itertools.chain(*looked_for), "a", "b", "c", "d"] if looked_for else ["a", "b", "c", "d"]
    kinds = [type(step).__name__ for step in converter.operations]
    converter = WeightConverter(sources, targets[: len(converter.target_patterns)], converter.operations)
    if not NOT_EXPRESSED.isdisjoint(kinds):
        assert convert_lazily(converter, "model.a", [], Model()) is None
        return
    lists = {"MergeModulelist", "ErnieFuseAndSplitTextVisionExperts"} & set(kinds)
    shape: tuple[int, ...] = (36, WIDTH)
    if "Split" in kinds:
        shape = (12 * len(converter.target_patterns), WIDTH)
    if "Interleave" in kinds or getattr(converter.operations[0], "dim1", 0) == 2:
        shape = (2, 36, WIDTH)
    first = f"model.{targets[0]}"
    parameters = dict.fromkeys((f"model.{target}" for target in targets), (12, WIDTH))
    if "Transpose" in kinds:
        parameters[first] = data.draw(st.sampled_from([shape, (*shape[:-2], shape[-1], shape[-2])]))
    lazies, reals = [], []
    for pattern in sources:
        for index in range(4 if lists else 1):
            stored, real = pool.take(shape)
            lazies.append((f"{pattern}.{index}", pattern, stored))
            reals.append((f"{pattern}.{index}", pattern, real))
    model = Model(parameters)
    check(data, pool, convert_lazily(converter, first, lazies, model), transformers_own(converter, reals, model, first))


class Transpose(core_model_loading.Transpose):  # type: ignore[misc]
    """An operation of the same name that does something else."""


@pytest.mark.parametrize(
    ("operations", "shape"),
    [
        ([Transpose(0, 1)], (3, 4)),
        ([core_model_loading._IdentityOp()], (3, 4)),
        ([operation("Interleave", 0)], (8,)),  # a read an element would be slower than the whole
    ],
)
def test_what_the_table_cannot_tell_is_not_expressed(pool, operations, shape) -> None:
    if None in operations:
        pytest.skip("not in this transformers")
    converter = WeightConverter(["x"], ["a"], operations)
    assert convert_lazily(converter, TARGET, [("x", "x", pool.take(shape)[0])], Model()) is None


def test_mixed_dtypes_are_not_expressed(pool) -> None:
    sources = [("x.0", "x", pool.take((2, 3))[0]), ("x.1", "x", Resident(torch.zeros(2, 3, dtype=torch.float64)))]
    converter = WeightConverter(["x"], ["a"], [operation("MergeModulelist", 0)])
    assert convert_lazily(converter, TARGET, sources, Model()) is None


def test_what_transformers_cannot_convert_is_one_clear_error(pool) -> None:
    converter = WeightConverter(["x", "y"], ["a"], [operation("MergeModulelist", 0), operation("Concatenate", 1)])
    sources = [(f"experts.{index}.{name}", name, pool.take((2, 3))[0]) for name in "xy" for index in range(3)]
    for left, says in (
        (sources[:-1], "got 3 tensors of x and 2 tensors of y, expected what Concatenate can convert"),
        (sources[:3], "got 3 tensors of x, expected what Concatenate can convert"),
        ([*sources[:2], ("x.2", "x", pool.take((2, 4))[0])], "got 3 tensors of x, expected what MergeModulelist can"),
    ):
        with pytest.raises(CheckpointError, match=r"made of experts\.0\.x") as caught:
            convert_lazily(converter, TARGET, left, Model())
        assert says in str(caught.value)
        with pytest.raises((type(caught.value.__cause__), RuntimeError)):  # whose class differs between releases
            transformers_own(converter, [(name, pattern, lazy.materialize()) for name, pattern, lazy in left], Model())
