"""The config of a small model of the same architecture, which is sharded in the same way.

Numbers of heads, experts, groups and experts a token stay. Widths shrink, and so does depth, to the first layers among
which every kind of layer occurs. No architecture is known by name; the tables below hold names of config fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..anatomy.classes import generating_class, without_memory
from ..anatomy.layers import kind
from ..errors import TensorParallelError, UnsupportedError, describe

HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
HIDDEN = ("embed_dim", "n_embd", "d_model", "hidden_size")
"""Width that heads share, if a config has no width of a head."""
DEPTHS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|head_size|d_kv")
WIDTH = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size(_mlp)?|ffn_dim|lora_rank|proj_dim)|embed_dim|n_embd|d_model|n_inner|d_ff"
)
ROTATED = ("partial_rotary_factor", "rotary_pct")
INDICES = re.compile(r"\w+_(layers|indexes|indices)")
"""Lists of the layers that are of some kind."""
TOKEN_ID = re.compile(r"\w+_token_(id|index)")
WINDOWS = {"sliding_window": 4, "attention_chunk_size": 8}
"""Windows shorter than the prompts, so that they matter."""
LENGTHS = {"chunk_size": 8, "mamba_chunk_size": 8, "max_source_positions": 12}
"""Other lengths that memory grows with: chunks of state-space layers, frames of speech."""

STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
"""Names for the heads of Mamba-2, their width, and the factor of the model's width that all of them are together."""

BLOCK = 48
"""Modulus of widths: a small width divides by 2, 3, 4, 6 or 8 ranks if the true one does."""
VOCAB = 4 * BLOCK
FIRST_ID = 3
HEAD_WIDTHS = (8, 16, 32, 64)
PATCHES = 4
"""Patches along each side of an image."""

_UNUSED = (
    *("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version", "output_attentions"),
    *("out_features", "out_indices", "stage_names"),  # a backbone's: by default its last layer
)

Level = dict[str, Any]
"""A config as a dict; configs within it, such as `text_config`, are levels of their own."""


def shrink(config: PretrainedConfig, cls: type[PreTrainedModel] | None = None) -> PretrainedConfig:
    """A config of the same class, for a model of some hundred thousand parameters, or a few million.

    Equal widths stay equal, and heads times their width stays the hidden width where it was. Tokens that end a text are
    taken away, so that as many are generated as are asked for.

    Args:
        cls: the model's class; None for the one that generates.

    Raises:
        UnsupportedError: if transformers refuses the result, so that the config has a constraint unknown here.
    """
    with supported(f"a small {config.model_type}"):
        whole = config.to_dict()
        levels = list(_levels(whole))
        spaces = list(_state_spaces(levels))
        _shrink_widths(levels)
        for level, heads, head, factor in spaces:
            level[head] = level["hidden_size"] * level[factor] // level[heads]
        _shrink_ids(levels)
        for level in levels:
            for name, value in level.items():
                shortest = WINDOWS.get(name) or LENGTHS.get(name)
                if shortest and value:
                    level[name] = min(value, shortest)
                elif "vocab_size" in name and isinstance(value, int):  # a smaller one grows: prompts have their ids
                    level[name] = VOCAB + value % BLOCK
            _shrink_images(level, whole)
            for name in _UNUSED:
                level.pop(name, None)
        small = type(config).from_dict(whole)
        return type(config).from_dict(
            _first_layers(whole, _layers_needed(small, cls or generating_class(small), levels))
        )


@contextmanager
def supported(subject: str) -> Iterator[None]:
    """Turn any error of transformers into an UnsupportedError about `subject`, such as a small model."""
    try:
        yield
    except TensorParallelError:
        raise
    except Exception as error:
        got, expected = f"{type(error).__name__}: {error}", "a model that transformers can make and run in one process"
        fix = "See whether the config is whole; if it is, verify the plan on a real checkpoint."
        cause = None if isinstance(error, StopIteration) else error  # contextlib would raise that cause itself
        raise UnsupportedError(describe(subject, got=got, expected=expected, fix=fix)) from cause


def meta_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device. Raises UnsupportedError if the config makes none."""
    with supported(f"a {config.model_type}"):
        return without_memory(cls, config)


def _levels(level: Level) -> Iterator[Level]:
    """The config and those within it; `rope_parameters` belong to the level around them."""
    yield level
    for name, value in level.items():
        if isinstance(value, dict) and (name.endswith("_config") or name.isdecimal()):
            yield from _levels(value)


def _state_spaces(levels: list[Level]) -> Iterator[tuple[Level, str, str, str]]:
    """The levels whose heads are together as wide as the model times a factor, with the names for these."""
    for level in levels:
        for names in STATE_SPACES:
            heads, head, factor = (level.get(name) for name in names)
            if heads and head and factor and heads * head == level.get("hidden_size", 0) * factor:
                yield level, *names


def _shrink_widths(levels: list[Level]) -> None:
    """Give every width its small one: those that heads share first, then all others."""
    small: dict[int, int] = {}
    for level in levels:
        heads, hidden, head = _attention(level)
        if heads and hidden:
            base = next(width for width in HEAD_WIDTHS if _rotates(width, level))
            if hidden != heads * head:  # the heads together are not as wide as the model, and shall not become so
                base = next(factor for factor in range(-(-BLOCK // heads), BLOCK) if factor != base)
            small[hidden] = min(hidden, math.lcm(small.get(hidden, 1), heads * base))
    for level in levels:
        heads, hidden, head = _attention(level)
        if head:
            base = next(width for width in HEAD_WIDTHS if _rotates(width, level))
            _shrink_heads(level, small[hidden] / hidden if heads and hidden == heads * head else min(1.0, base / head))
    for level in levels:
        for name, width in level.items():
            if WIDTH.fullmatch(name) and isinstance(width, int) and width >= BLOCK:
                if width not in small:
                    candidates = range(BLOCK + width % BLOCK, width + BLOCK, BLOCK)
                    small[width] = next((each for each in candidates if each not in small.values()), width)
                level[name] = small[width]


def _attention(level: Level) -> tuple[int, int, int]:
    """(query heads, their width together, the width of one); 0 if the level has none."""
    named = [level[name] for name in HEADS if level.get(name)]
    heads = math.lcm(*named) if named else 0
    hidden = next((level[name] for name in HIDDEN if level.get(name)), 0)
    widths = [level[name] for name in level if HEAD_WIDTH.fullmatch(name) and level[name]]
    if not heads or hidden % heads:
        heads = hidden = 0
    return heads, hidden, min(widths) if widths else hidden // (heads or 1)


def _shrink_heads(level: Level, scale: float) -> None:
    """Multiply the fields about one head by `scale`."""
    for name, value in level.items():
        if (HEAD_WIDTH.fullmatch(name) or name in ("rotary_dim", "query_pre_attn_scalar")) and value:
            level[name] = round(value * scale)
    for rope in _dicts(level):
        for name, values in rope.items():
            if name == "mrope_section":  # parts of half a head: their sum counts
                ends = [round(sum(values[: stop + 1]) * scale) for stop in range(len(values))]
                rope[name] = [end - start for start, end in pairwise([0, *ends])]
            elif isinstance(values, list) and values and all(isinstance(value, float | int) for value in values):
                count = max(1, round(len(values) * scale))  # a factor for every pair of features
                rope[name] = [values[index * len(values) // count] for index in range(count)]


def _rotates(width: int, level: Level) -> bool:
    """True if the rotated part of a head of `width` features consists of pairs."""
    factors = [found[name] for found in (level, *_dicts(level)) for name in ROTATED if found.get(name)]
    return all(int(width * factor) >= 2 and int(width * factor) % 2 == 0 for factor in factors)


def _dicts(level: Level) -> Iterator[Level]:
    """Fields about rotation, for all layers or for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = level.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))


def _shrink_ids(levels: list[Level]) -> None:
    """Special tokens get small ids, equal ones equal; none of them ends a text."""
    ids: dict[int, int] = {}
    for level in levels:
        for name, value in level.items():
            if name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
                level[name] = None
            elif TOKEN_ID.fullmatch(name) and isinstance(value, int):
                level[name] = ids.setdefault(value, FIRST_ID + len(ids))
    for level in levels:
        if level.get("is_encoder_decoder") and level.get("decoder_start_token_id") is None:
            level["decoder_start_token_id"] = level.get("pad_token_id")


def _shrink_images(level: Level, whole: Level) -> None:
    """Images of PATCHES by PATCHES, and their share of tokens."""
    size, patch = level.get("image_size"), level.get("patch_size")
    if isinstance(size, int) and isinstance(patch, int) and size > PATCHES * patch:
        level["image_size"] = PATCHES * patch
        if whole.get("mm_tokens_per_image"):
            tokens = whole["mm_tokens_per_image"] * (PATCHES * patch / size) ** 2
            whole["mm_tokens_per_image"] = max(1, math.isqrt(round(tokens))) ** 2


def _is_by_layer(value: Any) -> bool:
    """True for a dict of levels by the numbers of layers (Gemma 4's `per_layer_config`)."""
    return isinstance(value, dict) and bool(value) and all(str(number).isdecimal() for number in value)


def _first_layers(level: Level, count: int) -> Level:
    """The config with at most `count` layers in every stack, and as many entries in lists that have one a layer."""
    depths = {level[name] for name in DEPTHS if level.get(name)}
    first = dict(level)
    for name, value in level.items():
        if _is_by_layer(value):
            first[name] = {number: own for number, own in value.items() if int(number) < count}
        elif isinstance(value, dict) and name.endswith("_config"):
            first[name] = _first_layers(value, count)
        elif name in DEPTHS and value:
            first[name] = min(value, count)
        elif isinstance(value, list) and len(value) in depths:
            first[name] = value[:count]
        elif (
            isinstance(value, dict) and value and all(str(key).isdecimal() for key in value)
        ):  # a layer's number: its own
            first[name] = {key: own for key, own in value.items() if int(key) < count}
        elif INDICES.fullmatch(name) and isinstance(value, list) and value:
            first[name] = [index for index in value if index < count] or [count - 1]
    return first


def _layers_needed(config: PretrainedConfig, cls: type[PreTrainedModel], levels: list[Level]) -> int:
    """Number of layers (2 at least) among which every kind of layer of a model occurs, in every stack."""
    model = without_memory(cls, config)
    depths = {level[name] for level in levels for name in DEPTHS if level.get(name)}
    needed = 2
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) in depths:
            kinds = [kind(layer) for layer in module]
            needed = max([needed, *(kinds.index(each) + 1 for each in kinds)])
    return needed
