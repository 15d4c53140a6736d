"""The config of a small model of the same architecture that is sharded in the same way.

The numbers of heads, experts, groups and experts per token stay. Widths shrink, and the depth shrinks to the first
layers that include every kind of layer. There are no special cases by architecture: the tables below hold config
fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ....errors import TensorParallelError, UnsupportedError
from ...command_line.models import generating_class, without_memory
from .widths import (
    NARROW,
    Level,
    Sizes,
    divide_widths,
    each_number,
    fit_sections,
    is_by_layer,
    levels_of,
    merged_width,
    of_layers,
    shrink_widths,
    update_dependent_widths,
)

DEPTHS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "layers", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_self_attends_per_block"),
)
BY_LAYER = ("layer_types", "layers_block_type")
"""Lists with one entry per layer; used if no field has the number of layers."""
SHALLOW = ("num_global_layers", "num_layers_per_stack")
"""Further numbers of layers, without lists of as many entries."""
STAGES = ("depths", "block_sizes")
"""Lists of the number of layers of each stage."""
INDICES = re.compile(r"\w+_(layers|indexes|indices|layer_ids)")
"""Lists of the indices of layers of one kind."""
TAKEN = re.compile(r"\w+_feature_layers?")
"""Index or indices of the layers whose hidden states are the image features."""
TOKEN_ID = re.compile(r"\w+_token_(id|index)|image_patch_id")
MEDIA = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
ENDS = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id")
WINDOWS = {"sliding_window": 4, "attention_window": 4, "attention_chunk_size": 8}
"""Windows shorter than the prompts, so that they have an effect."""
LENGTHS = {
    "chunk_size": 8, "mamba_chunk_size": 8, "max_source_positions": 12, "decoder_attention_num_groups": 8,
    "num_filters": 4, "base_channels": 32, "num_embeddings": 192, "encoder_hash_byte_group_vocab": 192,
}  # fmt: skip
"""Other lengths that memory grows with: state-space chunks, speech frames, channels that double, codes."""

LIMIT = 10_000_000
"""Most parameters of a small model, if possible."""
MOST = 20 * LIMIT
"""Most parameters of a small model; a larger one raises."""
FACTORS = (64, 32, 16, 8, 4, 2)
"""Divisors for all widths, if the config rejects individually chosen widths."""
LONGEST = 400
"""Most characters of another library's message."""
VOCAB = 4 * NARROW.block
FIRST_ID = 3
NEVER = -1
"""A token that no model generates."""
PATCHES = 4
"""Patches along each side of an image."""

_UNUSED = (
    *("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version", "output_attentions"),
    *("out_features", "out_indices", "stage_names"),  # of a backbone; the default is its last layer
)


def shrink(
    config: PretrainedConfig, cls: type[PreTrainedModel] | None = None, *, sizes: Sizes = NARROW
) -> PretrainedConfig:
    """Shrink a config to a model of some hundred thousand to a few million parameters; the class stays.

    Equal widths stay equal; if heads times head width is the hidden width, it stays so. If the config has other
    constraints, all widths are divided by the same number. End-of-text tokens are removed, so that `generate` returns
    the requested number of tokens.

    Args:
        cls: the model's class; None for a class that generates.
        sizes: the least widths; with units the model may have MOST parameters, and keeps its widths if need be.

    Raises:
        UnsupportedError: if transformers rejects every small config.
    """
    with supported(f"a small {config.model_type}"):
        cls = cls or generating_class(config)
        tried: list[tuple[int, PretrainedConfig]] = []
        first_error: Exception | None = None
        narrowings: list[Callable[[list[Level]], None]] = [partial(shrink_widths, sizes=sizes)]
        narrowings += [partial(divide_widths, factor=factor, sizes=sizes) for factor in FACTORS]
        limit = LIMIT
        if sizes.unit > 1:
            narrowings.append(lambda levels: None)
            limit = MOST
        for narrow in narrowings:
            try:
                small, model = _narrowed(config, cls, narrow, sizes)
            except Exception as error:
                first_error = first_error or error
                continue
            tried.append((sum(param.numel() for param in model.parameters()), small))
            if tried[-1][0] <= limit or tried[-1][0] > tried[0][0]:
                break
        if not tried:
            assert first_error is not None
            raise first_error
        count, small = min(tried, key=lambda entry: entry[0])
        if count > MOST:
            raise ValueError(f"its small model has {count:,} parameters")
        return small


def _narrowed(
    config: PretrainedConfig, cls: type[PreTrainedModel], narrow: Callable[[list[Level]], None], sizes: Sizes
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """The small config with widths shrunk by `narrow`, and its model; raises if transformers rejects it."""
    data = config.to_dict()
    levels = list(levels_of(data))
    merged = merged_width(data)
    narrow(levels)
    update_dependent_widths(data, merged)
    _shrink_ids(levels)
    for level in levels:
        for fields in of_layers(level):
            fields.update({name: min(fields[name], WINDOWS[name]) for name in WINDOWS if fields.get(name)})
        for name, value in level.items():
            shortest = WINDOWS.get(name) or LENGTHS.get(name)
            if shortest and value:
                level[name] = each_number(value, lambda length, most=shortest: min(length, most))
            elif "vocab_size" in name and isinstance(value, int):  # a smaller one grows, to hold the ids of prompts
                padded = name == "vocab_size" and bool(level.get("unpadded_vocab_size"))
                level[name] = (-(-VOCAB // sizes.block) + padded) * sizes.block + value % sizes.block
        _shrink_images(level, data)
        for name in _UNUSED:
            level.pop(name, None)
    return _first_layers(type(config), cls, data, {depth for level in levels for depth in _depths(level)})


@contextmanager
def supported(subject: str) -> Iterator[None]:
    """Convert any error of transformers to an UnsupportedError about `subject`, such as a small model."""
    try:
        yield
    except TensorParallelError:
        raise
    except Exception as error:
        got, expected = one_line(error), "a model that transformers can make and run in one process"
        fix = "See whether the config is complete; if it is, verify the plan on a real checkpoint."
        cause = None if isinstance(error, StopIteration) else error  # contextlib would raise the cause itself
        raise UnsupportedError(subject, got=got, expected=expected, fix=fix) from cause


def one_line(error: Exception) -> str:
    """The type and message of another library's error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]


def meta_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Make the model of a config on the meta device. Raises UnsupportedError if transformers cannot."""
    with supported(f"a {config.model_type}"):
        return without_memory(cls, config)


def _shrink_ids(levels: list[Level]) -> None:
    """Map special tokens to small ids, equal ids to equal ids; remove the end-of-text tokens."""
    ids: dict[int | str, int] = {}
    for level in levels:
        for name, value in level.items():
            if name in ENDS:
                level[name] = None
            elif TOKEN_ID.fullmatch(name) and isinstance(value, int):
                level[name] = ids.setdefault(value, FIRST_ID + len(ids))
            elif name in MEDIA and value is None:
                level[name] = ids.setdefault(name, FIRST_ID + len(ids))
    for level in levels:
        if level.get("is_encoder_decoder") and level.get("decoder_start_token_id") is None:
            level["decoder_start_token_id"] = level.get("pad_token_id") or FIRST_ID


def _shrink_images(level: Level, root: Level) -> None:
    """Shrink images to PATCHES x PATCHES patches, and their number of tokens in proportion."""
    size, patch = (
        value[0] if isinstance(value, list | tuple) and value else value
        for value in (level.get("image_size"), level.get("patch_size"))
    )
    if isinstance(size, int) and isinstance(patch, int) and size > PATCHES * patch:
        level["image_size"] = each_number(level["image_size"], lambda _: PATCHES * patch)
        for container in (level, root):
            if container.get("image_grid_pinpoints"):
                pinpoints = container["image_grid_pinpoints"]
                container["image_grid_pinpoints"] = [
                    [side * PATCHES * patch // size for side in pinpoint] for pinpoint in pinpoints
                ]
        if root.get("projector_patch_to_query_dict"):
            root["projector_patch_to_query_dict"] = {PATCHES**2: PATCHES}
        if root.get("mm_tokens_per_image"):
            tokens = root["mm_tokens_per_image"] * (PATCHES * patch / size) ** 2
            root["mm_tokens_per_image"] = max(1, math.isqrt(round(tokens))) ** 2


def _first_layers(
    kind_of_config: type[PretrainedConfig], cls: type[PreTrainedModel], data: Level, depths: set[int]
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """The config with the fewest layers (at least 2) that include every kind of layer, and its model."""
    _, true = _built(kind_of_config, cls, data)
    stacks = [module for module in true.modules() if isinstance(module, nn.ModuleList) and len(module) in depths]
    kinds = [[kind(layer) for layer in stack] for stack in stacks]
    all_kinds = {entry for stack in kinds for entry in stack}
    alternate = [level["layer_types"][:4] for level in levels_of(data) if level.get("layer_types")]
    needed = max([2, *(stack.index(entry) + 1 for stack in (*kinds, *alternate) for entry in stack)])
    for count in range(2 if needed > 4 else needed, max([*depths, 2]) + 1):
        try:
            small, model = _built(kind_of_config, cls, _of_depth(data, count))
        except Exception:
            if count == max([*depths, 2]):
                raise
            continue
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        if count >= needed or all_kinds <= {kind(layer) for layers in lists for layer in layers}:
            return small, model
    return small, model


def _built(
    kind_of_config: type[PretrainedConfig], cls: type[PreTrainedModel], data: Level
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Make a config and its model on the meta device; adapt rotary sections (`mrope_section`) to the rotary width."""
    try:
        config = kind_of_config.from_dict(data)
    except Exception:  # some require an end-of-text token
        for level in levels_of(data):
            level.update({name: NEVER for name in ENDS if name in level and level[name] is None})
        config = kind_of_config.from_dict(data)
    model = without_memory(cls, config)
    unfit = False
    for module in model.modules():
        sections, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if isinstance(sections, list) and frequencies is not None and sum(sections) != frequencies.shape[-1]:
            for level in levels_of(data):
                if level.get("model_type") == module.config.model_type and isinstance(
                    level.get("rope_parameters"), dict
                ):
                    level["rope_parameters"]["mrope_section"] = fit_sections(frequencies.shape[-1], sections)
                    unfit = True
    if not unfit:
        return config, model
    config = kind_of_config.from_dict(data)
    return config, without_memory(cls, config)


def _of_depth(level: Level, count: int) -> Level:
    """The config with at most `count` layers in every stack, and as many entries in lists with one entry per layer."""
    own = next((level[name] for name in DEPTHS if level.get(name)), count)
    first = dict(level)
    for name, value in level.items():
        if is_by_layer(value):
            first[name] = {number: layer for number, layer in value.items() if int(number) < count} or value
        elif isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            first[name] = _of_depth(value, count)
        elif name in (*DEPTHS, *SHALLOW) and value:
            first[name] = min(value, count)
        elif name in STAGES and isinstance(value, list):
            first[name] = [min(layers, 2) for layers in value]
        elif isinstance(value, list) and len(value) in _depths(level):
            first[name] = value[:count]
        elif INDICES.fullmatch(name) and isinstance(value, list) and value:
            first[name] = [index for index in value if index < count] or [count - 1]
        elif name.endswith("_shared_layers") and isinstance(value, int):
            first[name] = value * count // max(own, count)
        elif TAKEN.fullmatch(name):
            first[name] = _taken(value, count)
    stack = level.get("num_layers_per_stack")
    if stack and level.get("num_hidden_layers", 0) % stack == 0:
        first["num_hidden_layers"] = first["num_layers_per_stack"] * (level["num_hidden_layers"] // stack)
    if "vision_output_dim" in level:
        update_dependent_widths(first, 0)
    return first


def _depths(level: Level) -> set[int]:
    """The numbers of layers in the fields of one level."""
    named = {level[name] for name in DEPTHS if level.get(name)}
    return named | {len(level[name]) for name in BY_LAYER if level.get(name)}


def _taken(value: Any, count: int) -> Any:
    """Map indices of feature layers to the first `count` layers; distinct ones stay distinct if possible."""
    if isinstance(value, int):
        return max(-count, min(value, count))
    if isinstance(value, list) and value and all(isinstance(index, int) for index in value):
        ranks = sorted(set(value), reverse=True)
        return [max(-count, index) if index < 0 else max(0, count - 1 - ranks.index(index)) for index in value]
    return value


def kind(layer: nn.Module) -> tuple[Any, ...]:
    """A description that is equal for equal layers: modules, parameter shapes, and settings such as a window."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((param, tuple(value.shape)) for param, value in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | str | int | None) and not key.endswith(("idx", "index", "id", "number"))
            ),
        )
        for name, module in layer.named_modules()
    )
