"""Shrink the widths of a config: equal widths stay equal, and heads times head width stays the hidden width."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

HEADS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "num_self_attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
HIDDEN = ("embed_dim", "n_embd", "d_model", "hidden_size", "emb_dim", "dim", "hidden_dim", "d_latents")
"""Total width of the heads, if a config has no head width."""
HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|(attention_)?head_size|d_kv|d_head|dim_head|kv_channels")
OF_ALL_HEADS = ("head_dim", "attention_head_dim", "attention_head_size", "d_head", "kv_channels")
"""Head widths for which heads times head width may equal another width field."""
WIDTH = re.compile(
    r"(\w+_)?(hidden_sizes?|intermediate_sizes?(_mlp)?|ffn_dim|(proj|projection|in|input|output|hidden|expert|embds)_dim"
    r"|lora_rank|embed_dim|embedding_(dim|size)|bottleneck_size|feed_forward_size|hidden_dimension|out_channel"
    r"|conv_channels|downsample_channels|adapter_input_size)|emb_dim|dim|n_embd|d_model|d_latents|d_inner|n_inner|d_ff|dim_ff|codebook_dim|upsample_groups"
)
OF_EXPERTS = re.compile(r"\w*(moe|expert)\w*")
"""Widths of experts."""
OUTWARD = ("out_hidden_size", "text_hidden_size", "output_dim", "mm_embed_dim")
"""Output widths of a tower, equal to the text model's width: some classes have different defaults."""
ROTATED = ("partial_rotary_factor", "rotary_pct")
SCALARS = ("rotary_dim", "query_pre_attn_scalar")
"""Other fields that scale with the head width."""

STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
"""Fields of Mamba-2: number of heads, head width, and the ratio of their total width to the model's width."""

HEAD_WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small model: the least ones, and their moduli."""

    block: int = 48
    """Modulus of widths: a small width is divisible by 2, 3, 4, 6 or 8 ranks if the original is."""
    expert_block: int = 12
    """Modulus of experts' widths, smaller since a model has hundreds; multiples of 4 stay so, for grouped matmuls."""
    unit: int = 1
    """Modulus of heads, and of the hidden width, which a small model keeps."""
    heads: tuple[int, ...] = HEAD_WIDTHS


NARROW = Sizes()
UNIT = 64


def of_kernels(ranks: int) -> Sizes:
    """Sizes at which `ranks` ranks use the kernels that a CPU has for the widths of real models: 64 columns each."""
    return Sizes(UNIT * ranks, UNIT * ranks, UNIT, (UNIT, 2 * UNIT))


Level = dict[str, Any]
"""A config as a dict; nested configs, such as `text_config`, are separate levels."""


def shrink_widths(levels: list[Level], sizes: Sizes = NARROW) -> None:
    """Shrink every width: first hidden and head widths, then widths of experts, then all others."""
    small: dict[int, int] = {}
    spaces = list(_state_spaces(levels))
    relations = list(_relations(levels))
    for level in levels:
        heads, hidden, head = _attention(level)
        if heads and hidden:
            base = next(width for width in _heads_like(head, sizes) if _rotates(width, level))
            if hidden != heads * head:  # the total head width must stay different from the hidden width
                # If the head width may be another kind of heads', attention may use hidden / heads, even for rotary.
                step = 1 if any(level.get(name) for name in OF_ALL_HEADS) else 2
                base = next(
                    factor
                    for factor in range(-(-sizes.block // heads), sizes.block)
                    if factor != base and not factor % step and not (heads * factor - hidden) % sizes.unit
                )
            small[hidden] = min(hidden, math.lcm(small.get(hidden, 1), heads * base))
    for level in levels:
        heads, hidden, head = _attention(level)
        if head:
            least = min([width for _, width in _head_widths(level)] or [head])
            base = next(width for width in _heads_like(least, sizes) if _rotates(head * width // least, level))
            scale = small[hidden] / hidden if heads and hidden == heads * head else min(1.0, base / least)
            for container in (level, *of_layers(level)):
                _shrink_heads(container, scale)
    fields = [(container, name) for level in levels for container in (level, *of_layers(level)) for name in container]
    fields = [(level, name) for level, name in fields if WIDTH.fullmatch(name)]
    for level, name in sorted(fields, key=lambda field: not OF_EXPERTS.fullmatch(field[1])):
        block = sizes.expert_block if OF_EXPERTS.fullmatch(name) else sizes.block
        level[name] = each_number(level[name], lambda width, block=block: _small(width, small, block, sizes))
    _keep(spaces, relations)


def divide_widths(levels: list[Level], factor: int, sizes: Sizes = NARROW) -> None:
    """Divide the widths that `factor` divides by it, so that their sums and ratios are preserved.

    Raises ValueError if a head, or a width of `sizes` with units, would be too narrow.
    """
    spaces = list(_state_spaces(levels))
    relations = list(_relations(levels))
    for level in levels:
        heads, hidden, head = _attention(level)
        narrowest = min([width for _, width in _head_widths(level)] or [head]) // factor
        if heads and hidden and (narrowest < sizes.heads[0] or not _rotates(narrowest, level)):
            raise ValueError(f"heads of {narrowest} features")
        for container in (level, *of_layers(level)):
            _shrink_heads(container, 1 / factor)
            for name, value in container.items():
                if WIDTH.fullmatch(name):
                    container[name] = each_number(value, lambda width: _divided(width, factor, sizes))
    _keep(spaces, relations)


def merged_width(config: Level) -> int:
    """Ratio of `out_hidden_size` to the width of the vision tower; 0 if that is no integer."""
    width, vision = config.get("out_hidden_size"), config.get("vision_config")
    tower = vision.get("hidden_size") if isinstance(vision, dict) else None
    return width // tower if width and tower and width % tower == 0 else 0


def update_dependent_widths(config: Level, merged: int) -> None:
    """Recompute the widths that depend on others; `merged` is the original config's `merged_width`."""
    text = config.get("text_config")
    width = text.get("hidden_size") if isinstance(text, dict) else None
    for level in levels_of(config):
        if isinstance(width, int) and level is not config and level is not text:
            outward = [name for name in OUTWARD if isinstance(level.get(name), int)]
            if "embed_dim" in level and "spatial_merge_size" in level:  # output as wide as text; embed_dim inside
                outward.append("hidden_size")
            level.update(dict.fromkeys(outward, width))
        if level.get("pixel_shuffle_ratio") and "projector_input_dim" in level:
            level["intermediate_size"] = int(level["hidden_size"] / level["pixel_shuffle_ratio"] ** 2)
        if "vision_output_dim" in level:
            states = 1 + len(level.get("intermediate_layers_indices") or ())
            level["vision_output_dim"] = level.get("projector_output_dim", level["hidden_size"] * states)
    if merged:
        config["out_hidden_size"] = merged * config["vision_config"]["hidden_size"]
    if isinstance(config.get("hidden_size"), int) and isinstance(width, int):
        config["hidden_size"] = width


def fit_sections(rotated: int, sections: list[int]) -> list[int]:
    """Divide `rotated` pairs of features in the proportions of `sections`; equal sections stay equal if possible."""
    exact = [section * rotated / sum(sections) for section in sections]
    fitted = [int(share) for share in exact]
    order = sorted(
        range(len(sections)), key=lambda index: (sections.count(sections[index]), fitted[index] - exact[index])
    )
    for index in order[: rotated - sum(fitted)]:
        fitted[index] += 1
    return fitted


def levels_of(level: Level) -> Iterator[Level]:
    """The config and its nested configs; `rope_parameters` and per-layer fields belong to the enclosing level."""
    yield level
    for name, value in level.items():
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value) and not is_by_layer(value):
            yield from levels_of(value)


def is_by_layer(value: Any) -> bool:
    """True for a dict with layer numbers as keys (Gemma 4's `per_layer_config`)."""
    return isinstance(value, dict) and bool(value) and all(str(number).isdecimal() for number in value)


def of_layers(level: Level) -> Iterator[Level]:
    """The per-layer fields of a level."""
    for value in level.values():
        if is_by_layer(value):
            yield from (fields for fields in value.values() if isinstance(fields, dict))


def each_number(value: Any, change: Any) -> Any:
    """Apply `change` to an integer, or to each in a list."""
    if isinstance(value, list | tuple):
        return [each_number(item, change) for item in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _heads_like(head: int, sizes: Sizes) -> Iterator[int]:
    """Head widths to try in place of `head`, with its remainder."""
    return (width + head % sizes.unit for width in sizes.heads)


def _divided(width: int, factor: int, sizes: Sizes) -> int:
    if sizes.unit > 1 and not width % factor and width // factor < sizes.block:
        raise ValueError(f"a width of {width // factor}")
    return width if width % factor else width // factor


def _small(width: int, small: dict[int, int], block: int, sizes: Sizes) -> int:
    """The small width for `width`; different widths get different small widths."""
    if width < sizes.block:
        return width
    if width not in small:
        candidates = range(block + width % block, width + block, block)
        small[width] = next((candidate for candidate in candidates if candidate not in small.values()), width)
    return small[width]


def _state_spaces(levels: list[Level]) -> Iterator[tuple[Level, str, str, str]]:
    """(level, field names) where heads times head width equals the hidden width times the factor; see STATE_SPACES."""
    for level in levels:
        for names in STATE_SPACES if level.get("mamba_d_ssm") is None else ():  # the total head width, if set
            heads, head, factor = (level.get(name) for name in names)
            if heads and head and factor and heads * head == level.get("hidden_size", 0) * factor:
                yield level, *names


def _relations(levels: list[Level]) -> Iterator[tuple[Level, str, str, str]]:
    """(level, heads, head width, width) of fields where the width is the product of the other two."""
    for level in levels:
        numbers = {name: value for name, value in level.items() if isinstance(value, int)}
        for heads, head in product(numbers.keys() & set(HEADS), numbers.keys() & set(OF_ALL_HEADS)):
            for name, width in numbers.items():
                if "hidden" in name and WIDTH.fullmatch(name) and numbers[heads] * numbers[head] == width:
                    yield level, heads, head, name


def _keep(spaces: list[tuple[Level, str, str, str]], relations: list[tuple[Level, str, str, str]]) -> None:
    """Recompute the head widths of state spaces. Raises ValueError if a relation no longer holds."""
    for level, heads, head, factor in spaces:
        level[head] = level["hidden_size"] * level[factor] // level[heads]
    for level, heads, head, width in relations:
        if level[heads] * level[head] != level[width]:
            raise ValueError(f"{width} is no longer {heads} by {head}")


def _attention(level: Level) -> tuple[int, int, int]:
    """(query heads, total width, head width); 0 if the level has none."""
    counts = [level[name] for name in HEADS if isinstance(level.get(name), int) and level[name]]
    heads = math.lcm(*counts) if counts else 0
    hidden = next((level[name] for name in HIDDEN if isinstance(level.get(name), int)), 0)
    widths = _head_widths(level)
    if not heads or hidden % heads:
        heads = hidden = 0
    candidates = [width for name, width in widths if name in OF_ALL_HEADS] or [width for _, width in widths]
    return heads, hidden, min(candidates) if candidates else hidden // (heads or 1)


def _head_widths(level: Level) -> list[tuple[str, int]]:
    """(name, value) of the head width fields."""
    return [(name, level[name]) for name in level if HEAD_WIDTH.fullmatch(name) and level[name]]


def _shrink_heads(level: Level, scale: float) -> None:
    """Multiply the fields of one head by `scale`."""
    for name, value in level.items():
        if (HEAD_WIDTH.fullmatch(name) or name in SCALARS) and value:
            level[name] = round(value * scale)
    for rope in _dicts(level):
        for name, values in rope.items():
            if name == "mrope_section":  # sections of half a head: their sum matters
                rope[name] = fit_sections(round(sum(values) * scale), values)
            elif isinstance(values, list) and values and all(isinstance(value, float | int) for value in values):
                count = max(1, round(len(values) * scale))  # one factor per pair of features
                rope[name] = [values[index * len(values) // count] for index in range(count)]


def _rotates(width: int, level: Level) -> bool:
    """True if the rotary features of a head of `width` features are even in number, and its key is not too narrow."""
    if width * level.get("qk_dim_factor", 1) < HEAD_WIDTHS[0]:
        return False
    factors = [fields[name] for fields in (level, *_dicts(level)) for name in ROTATED if fields.get(name)]
    return all(int(width * factor) >= 2 and int(width * factor) % 2 == 0 for factor in factors)


def _dicts(level: Level) -> Iterator[Level]:
    """The rotary fields, for all layers or for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = level.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))
