"""Real models' checkpoints, converted lazily and sliced, against transformers' own loads; and what is read of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

import tp_transformers
from tests.support.comparisons import read_folder
from tests.support.models import load
from tests.unit.slices.test_lazy import select
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.conversion.convert import Conversion, convert, own_dtypes
from tp_transformers.checkpoint.reading.header import Checkpoint
from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.checkpoint.reading.reader import read
from tp_transformers.slices.layout import Ranks, packed
from tp_transformers.slices.lazy import Deferred, LazyTensor, Resident
from tp_transformers.slices.stored import Stored

TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 16,
    "out_hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
NARROW: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}

MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ernie4_5_vl_moe": (
        {
            "text_config": TEXT | ROPE | {"moe_num_experts": 4, "moe_intermediate_size": [12, 8]},
            "vision_config": VISION,
        },
        {"gate_up_proj", "down_proj", "weight"},
    ),
    "gemma3": ({"text_config": TEXT, "vision_config": {"hidden_size": 16, "image_size": 16}}, set()),
    "mixtral": (TEXT | {"num_local_experts": 3}, {"gate_up_proj", "down_proj"}),
    "qwen3_moe": (TEXT | NARROW | {"num_experts": 12}, {"gate_up_proj", "down_proj"}),
    "qwen3_vl_moe": (
        {
            "text_config": TEXT | ROPE | NARROW | {"num_experts": 3},
            "vision_config": VISION | {"deepstack_visual_indexes": [0]},
        },
        set(),
    ),
}
"""Model type -> its config, and the last names of the parameters that are converted."""


def save_model(folder: Path, model_type: str) -> type[PreTrainedModel]:
    """Write a tiny random checkpoint as transformers stores it; return the model's class."""
    settings, _ = MODELS[model_type]
    if model_type == "gemma3":
        small = {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
        settings = settings | {"vision_config": settings["vision_config"] | small, "mm_tokens_per_image": 4}
    auto = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(folder, max_shard_size="20KB")
    return type(model)


def conversion_of(folder: Path, kind: type[PreTrainedModel], checkpoint: Checkpoint) -> Conversion:
    """What the checkpoint means to a model of this kind that has no memory."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = kind(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return convert(model, checkpoint.tensors, shapes, get_model_conversion_mapping(model))


def open_folder(folder: Path) -> Checkpoint:
    return Checkpoint(sorted(folder.glob("*.safetensors")))


def fill(lazy: LazyTensor) -> torch.Tensor:
    """Read as the loader does."""
    destination = torch.full(lazy.shape, 77).to(lazy.dtype)
    steps = list(lazy.read_steps(destination))
    read([Request(step, view) for step, view in steps if isinstance(step, Stored)])
    assert all(isinstance(step, Stored) or not step.numel() for step, _ in steps), "nothing is read whole"
    return destination


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """`checkpoints(model_type)`: (folder, class, what transformers loads from it, expressions); made once."""
    made: dict[str, Any] = {}
    opened: list[Checkpoint] = []

    def make(model_type: str) -> Any:
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            kind = save_model(folder, model_type)
            opened.append(open_folder(folder))
            reference = kind.from_pretrained(folder).state_dict()
            made[model_type] = folder, kind, reference, conversion_of(folder, kind, opened[-1])
        return made[model_type]

    yield make
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.parametrize("model_type", MODELS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_slices_of_what_transformers_loads(checkpoints, model_type, seed) -> None:
    _, _, reference, conversion = checkpoints(model_type)
    assert not conversion.unexpected
    converted = {name for name, lazy in conversion.expressions.items() if not isinstance(lazy, Stored)}
    assert {name.rpartition(".")[2] for name in converted} == MODELS[model_type][1]
    random = Random(seed)
    for name, lazy in conversion.expressions.items():
        value = reference[name]
        for _ in range(random.randint(0, 2) if value.ndim else 0):
            dim = random.randrange(value.ndim)
            length = value.shape[dim]
            pairs = ([random.randint(0, length), random.randint(0, length)] for _ in range(random.randint(1, 3)))
            chosen = [(min(pair), max(pair)) for pair in pairs]
            lazy, value = lazy.select(dim, chosen), select(value, dim, chosen)
        assert torch.equal(fill(lazy), value), name


def halves(length: int) -> Iterator[list[tuple[int, int]]]:
    for held in Ranks(2).split(length).ranges:
        yield list(held)


def test_a_rank_reads_its_rows_and_columns_of_every_expert(checkpoints) -> None:
    folder, kind, reference, _ = checkpoints("mixtral")
    with open_folder(folder) as checkpoint:
        headers = checkpoint.bytes_read
        assert headers == sum(
            8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors")
        )
        expressions = conversion_of(folder, kind, checkpoint).expressions
        assert checkpoint.bytes_read == headers, "expressing reads nothing"
        gate_up = expressions["model.layers.0.mlp.experts.gate_up_proj"]  # (3, 24 + 24, 16)
        down = expressions["model.layers.0.mlp.experts.down_proj"]  # (3, 16, 24)
        rows = packed([Ranks(2).split(24), Ranks(2).split(24)])
        for rank in range(2):
            for name, shard, dim, held in (
                ("gate_up_proj", gate_up.select(1, rows.ranges[rank]), 1, rows.ranges[rank]),
                ("down_proj", down.select(2, Ranks(2).split(24).ranges[rank]), 2, Ranks(2).split(24).ranges[rank]),
            ):
                before = checkpoint.bytes_read
                value = fill(shard)
                whole = reference[f"model.layers.0.mlp.experts.{name}"]
                assert torch.equal(value, select(whole, dim, list(held)))
                assert checkpoint.bytes_read - before == whole.nbytes // 2


def test_a_rank_reads_its_columns_where_a_transposed_tensor_is_stored(checkpoints, tmp_path) -> None:
    """Experts of (in, out) in the file and (out, in) in the model."""
    folder, kind, reference, _ = checkpoints("qwen3_vl_moe")
    tensors = read_folder(folder)
    for name in tensors:
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    kind.config_class.from_pretrained(folder).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in reference.items()), "transformers takes both"
    with open_folder(tmp_path) as checkpoint:
        expressions = conversion_of(tmp_path, kind, checkpoint).expressions
        for name, dim in (("gate_up_proj", 1), ("down_proj", 2), ("down_proj", 0)):
            name = f"model.language_model.layers.0.mlp.experts.{name}"
            for held in halves(loaded[name].shape[dim]):
                before = checkpoint.bytes_read
                expected = select(loaded[name], dim, held)
                assert torch.equal(fill(expressions[name].select(dim, held)), expected)
                assert checkpoint.bytes_read - before == expected.nbytes


def test_experts_are_in_the_order_of_their_numbers(checkpoints) -> None:
    """Twelve of them, so that 10 and 11 come after 9 and not after 1."""
    _, _, reference, conversion = checkpoints("qwen3_moe")
    name = "model.layers.1.mlp.experts.down_proj"
    assert reference[name].shape[0] == 12
    assert torch.equal(conversion.expressions[name].materialize(), reference[name])


def drop(folder: Path, target: Path, *endings: str) -> None:
    """Copy a checkpoint without the tensors whose names end so."""
    tensors = {name: value for name, value in read_folder(folder).items() if not name.endswith(endings)}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    AutoConfig.from_pretrained(folder).save_pretrained(target)


@pytest.mark.parametrize(
    ("endings", "says"),
    [
        # A whole expert: transformers stacks those there are, and finds another shape.
        ([".1.w1.weight", ".1.w2.weight", ".1.w3.weight"], "gate_up_proj: got (2, 48, 16), expected (3, 48, 16)"),
        # One of its tensors: transformers' converter fails.
        ([".1.w1.weight"], r"experts.*.w1.weight and 3 tensors of .experts.*.w3.weight"),
        ([".w1.weight"], r"got 3 tensors of .experts.*.w3.weight, expected what Concatenate can convert"),
    ],
)
def test_missing_experts_are_one_clear_error(checkpoints, tmp_path, endings, says) -> None:
    folder, kind, _, _ = checkpoints("mixtral")
    drop(folder, tmp_path, *endings)
    with pytest.raises(Exception, match=r"(?i)mismatch|conversion|convert|issues"):
        kind.from_pretrained(tmp_path)
    with tp_transformers.enable(), pytest.raises(CheckpointError) as caught:
        kind.from_pretrained(tmp_path, tp_plan={"lm_head": "colwise_rep"})
    assert says in str(caught.value)


def test_all_experts_missing_are_reported_and_initialised(checkpoints, tmp_path) -> None:
    folder, kind, _, _ = checkpoints("mixtral")
    drop(folder, tmp_path, ".w1.weight", ".w2.weight", ".w3.weight")
    _, expected = kind.from_pretrained(tmp_path, output_loading_info=True)
    _, info = load(tmp_path, kind, tp_plan={"lm_head": "colwise_rep"}, output_loading_info=True)
    assert sorted(info["missing_keys"]) == sorted(expected["missing_keys"])
    assert len(info["missing_keys"]) == 4


class Reversed(ConversionOps):  # type: ignore[misc]
    """An operation that nobody knows."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: torch.stack(tensors[::-1])}


def test_an_unknown_operation_reads_its_own_sources_whole(checkpoints, monkeypatch) -> None:
    folder, kind, reference, _ = checkpoints("mixtral")
    with torch.device("meta"):
        model = kind(AutoConfig.from_pretrained(folder))
    mapping = [
        WeightConverter(entry.source_patterns, entry.target_patterns, [Reversed()])
        if isinstance(entry, WeightConverter) and [type(step) for step in entry.operations] == [MergeModulelist]
        else entry
        for entry in get_model_conversion_mapping(model)
    ]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with open_folder(folder) as checkpoint:
        conversion = convert(model, checkpoint.tensors, shapes, mapping)
        assert conversion.fallbacks == [f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)]
        expressions = conversion.expressions
        for name, lazy in expressions.items():
            assert isinstance(lazy, Deferred) == name.endswith("down_proj")
        name = "model.layers.0.mlp.experts.down_proj"
        value = expressions[name].select(2, [(3, 9)]).materialize()
        assert torch.equal(value, reference[name].flip(0)[..., 3:9])


def test_converters_measure_against_whole_parameters(checkpoints) -> None:
    """Not against what a parallelized model holds: a shard may have the very shape that tells not to transpose."""
    folder, kind, reference, _ = checkpoints("qwen3_vl_moe")
    with torch.device("meta"):
        model = kind(AutoConfig.from_pretrained(folder))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    experts = model.get_submodule("model.language_model.layers.0.mlp.experts")
    experts.down_proj = torch.nn.Parameter(torch.empty(3, 12, 16, device="meta"))
    with open_folder(folder) as checkpoint:
        expressions = convert(model, checkpoint.tensors, shapes, get_model_conversion_mapping(model)).expressions
        name = "model.language_model.layers.0.mlp.experts.down_proj"
        assert torch.equal(expressions[name].materialize(), reference[name])


def test_a_parameter_has_the_dtype_of_the_pattern_that_its_name_has() -> None:
    names = ("model.layers.0.norm.weight", "lm_head.weight", "model.layers.0.mlp.weight")
    found = own_dtypes(names, {"norm": torch.float32, "lm_head": torch.float64})
    assert found == dict(zip(names[:2], (torch.float32, torch.float64), strict=True))
    assert own_dtypes(names, None) == {}


def test_tensors_that_the_model_does_not_have_are_named() -> None:
    model: Any = SimpleNamespace(base_model_prefix="model")
    tensors: dict[str, LazyTensor] = {name: Resident(torch.ones(1)) for name in ("known", "odd")}
    found = convert(model, tensors, {"known": torch.Size((1,))}, None)
    assert (set(found.expressions), found.unread, found.unexpected) == ({"known"}, {"odd": {"odd"}}, {"odd"})
