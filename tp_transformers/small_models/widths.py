"""Small widths of a config: equal widths stay equal, and heads times their width still make the hidden width."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

HEADS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "num_self_attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
HIDDEN = ("embed_dim", "n_embd", "d_model", "hidden_size", "emb_dim", "dim", "hidden_dim", "d_latents")
"""Width that heads share, if a config has no width of a head."""
HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|(attention_)?head_size|d_kv|d_head|dim_head|kv_channels")
OF_ALL_HEADS = ("head_dim", "attention_head_dim", "attention_head_size", "d_head", "kv_channels")
"""Widths of a head by which heads may be as wide as another width says, beside those of a kind of heads."""
WIDTH = re.compile(
    r"(\w+_)?(hidden_sizes?|intermediate_sizes?(_mlp)?|ffn_dim|(proj|projection|in|input|output|hidden|expert|embds)_dim"
    r"|lora_rank|embed_dim|embedding_(dim|size)|bottleneck_size|feed_forward_size|hidden_dimension|out_channel"
    r"|conv_channels|downsample_channels|adapter_input_size)|emb_dim|dim|n_embd|d_model|d_latents|d_inner|n_inner|d_ff|dim_ff|codebook_dim|upsample_groups"
)
OF_EXPERTS = re.compile(r"\w*(moe|expert)\w*")
"""Widths that a model has as often as it has experts."""
OUTWARD = ("out_hidden_size", "text_hidden_size", "output_dim", "mm_embed_dim")
"""Widths of a part's output, which the text's model takes: some classes have defaults of another width."""
ROTATED = ("partial_rotary_factor", "rotary_pct")
SCALARS = ("rotary_dim", "query_pre_attn_scalar")
"""Other fields about one head."""

STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
)
"""Names for the heads of Mamba-2, their width, and the factor of the model's width that all of them are together."""

BLOCK = 48
"""Modulus of widths: a small width divides by 2, 3, 4, 6 or 8 ranks if the true one does."""
EXPERT_BLOCK = 12
"""Modulus of experts' widths; a model has hundreds: a multiple of 4 stays one, as grouped products want."""
HEAD_WIDTHS = (8, 16, 32, 64)

Level = dict[str, Any]
"""A config as a dict; configs within it, such as `text_config`, are levels of their own."""


def shrink_widths(levels: list[Level]) -> None:
    """Give every width its small one: those that heads share first, then those of experts, then all others."""
    small: dict[int, int] = {}
    spaces = list(_state_spaces(levels))
    relations = list(_relations(levels))
    for level in levels:
        heads, hidden, head = _attention(level)
        if heads and hidden:
            base = next(width for width in HEAD_WIDTHS if _rotates(width, level))
            if hidden != heads * head:  # the heads together are not as wide as the model, and shall not become so
                # Heads of attention may be as wide as that, where other heads have a width of their own; they rotate.
                step = 1 if any(level.get(name) for name in OF_ALL_HEADS) else 2
                base = next(
                    factor for factor in range(-(-BLOCK // heads), BLOCK) if factor != base and not factor % step
                )
            small[hidden] = min(hidden, math.lcm(small.get(hidden, 1), heads * base))
    for level in levels:
        heads, hidden, head = _attention(level)
        if head:
            least = min([width for _, width in _head_widths(level)] or [head])
            base = next(width for width in HEAD_WIDTHS if _rotates(head * width // least, level))
            scale = small[hidden] / hidden if heads and hidden == heads * head else min(1.0, base / least)
            for each in (level, *of_layers(level)):
                _shrink_heads(each, scale)
    fields = [(each, name) for level in levels for each in (level, *of_layers(level)) for name in each]
    fields = [(level, name) for level, name in fields if WIDTH.fullmatch(name)]
    for level, name in sorted(fields, key=lambda field: not OF_EXPERTS.fullmatch(field[1])):
        block = EXPERT_BLOCK if OF_EXPERTS.fullmatch(name) else BLOCK
        level[name] = each_number(level[name], lambda width, block=block: _small(width, small, block))
    _keep(spaces, relations)


def divide_widths(levels: list[Level], factor: int) -> None:
    """Divide every width by `factor`, so that sums, products and ratios of widths are kept.

    Raises ValueError if a head would be too narrow.
    """
    spaces = list(_state_spaces(levels))
    relations = list(_relations(levels))
    for level in levels:
        heads, hidden, head = _attention(level)
        narrowest = min([width for _, width in _head_widths(level)] or [head]) // factor
        if heads and hidden and (narrowest < HEAD_WIDTHS[0] or not _rotates(narrowest, level)):
            raise ValueError(f"heads of {narrowest} features")
        for each in (level, *of_layers(level)):
            _shrink_heads(each, 1 / factor)
            for name, value in each.items():
                if WIDTH.fullmatch(name):
                    each[name] = each_number(value, lambda width: width if width % factor else width // factor)
    _keep(spaces, relations)


def merged_width(whole: Level) -> int:
    """How many times the width of its vision tower a model's `out_hidden_size` is; 0 if it is not."""
    width, vision = whole.get("out_hidden_size"), whole.get("vision_config")
    tower = vision.get("hidden_size") if isinstance(vision, dict) else None
    return width // tower if width and tower and width % tower == 0 else 0


def settle_widths(whole: Level, merged: int) -> None:
    """Give the widths that follow from others their values; `merged` is the true config's `merged_width`."""
    text = whole.get("text_config")
    width = text.get("hidden_size") if isinstance(text, dict) else None
    for level in levels_of(whole):
        if isinstance(width, int) and level is not whole and level is not text:
            outward = [name for name in OUTWARD if isinstance(level.get(name), int)]
            if "embed_dim" in level and "spatial_merge_size" in level:  # as wide as text, and embed_dim within
                outward.append("hidden_size")
            level.update(dict.fromkeys(outward, width))
        if level.get("pixel_shuffle_ratio") and "projector_input_dim" in level:
            level["intermediate_size"] = int(level["hidden_size"] / level["pixel_shuffle_ratio"] ** 2)
        if "vision_output_dim" in level:
            states = 1 + len(level.get("intermediate_layers_indices") or ())
            level["vision_output_dim"] = level.get("projector_output_dim", level["hidden_size"] * states)
    if merged:
        whole["out_hidden_size"] = merged * whole["vision_config"]["hidden_size"]
    if isinstance(whole.get("hidden_size"), int) and isinstance(width, int):
        whole["hidden_size"] = width


def fit_sections(rotated: int, sections: list[int]) -> list[int]:
    """Parts of `rotated` pairs of features, in the proportions of `sections`, equal ones equal if it can be."""
    exact = [section * rotated / sum(sections) for section in sections]
    fitted = [int(part) for part in exact]
    order = sorted(
        range(len(sections)), key=lambda index: (sections.count(sections[index]), fitted[index] - exact[index])
    )
    for index in order[: rotated - sum(fitted)]:
        fitted[index] += 1
    return fitted


def levels_of(level: Level) -> Iterator[Level]:
    """The config and those within it; `rope_parameters` and fields of one layer belong to the level around them."""
    yield level
    for name, value in level.items():
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value) and not is_by_layer(value):
            yield from levels_of(value)


def is_by_layer(value: Any) -> bool:
    """True for a dict by the numbers of layers (Gemma 4's `per_layer_config`)."""
    return isinstance(value, dict) and bool(value) and all(str(number).isdecimal() for number in value)


def of_layers(level: Level) -> Iterator[Level]:
    """The fields that single layers have for themselves."""
    for value in level.values():
        if is_by_layer(value):
            yield from (own for own in value.values() if isinstance(own, dict))


def each_number(value: Any, change: Any) -> Any:
    """A number, or a list of them, changed."""
    if isinstance(value, list | tuple):
        return [each_number(item, change) for item in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _small(width: int, small: dict[int, int], block: int) -> int:
    """The small width of a width, another one than those of others."""
    if width < BLOCK:
        return width
    if width not in small:
        candidates = range(block + width % block, width + block, block)
        small[width] = next((each for each in candidates if each not in small.values()), width)
    return small[width]


def _state_spaces(levels: list[Level]) -> Iterator[tuple[Level, str, str, str]]:
    """The levels with heads that are together as wide as the model times a factor, with the names for these."""
    for level in levels:
        for names in STATE_SPACES if level.get("mamba_d_ssm") is None else ():  # which says how wide they are
            heads, head, factor = (level.get(name) for name in names)
            if heads and head and factor and heads * head == level.get("hidden_size", 0) * factor:
                yield level, *names


def _relations(levels: list[Level]) -> Iterator[tuple[Level, str, str, str]]:
    """The fields of which one, a width, is the product of two others: a number of heads and the width of one."""
    for level in levels:
        numbers = {name: value for name, value in level.items() if isinstance(value, int)}
        for heads, head in product(numbers.keys() & set(HEADS), numbers.keys() & set(OF_ALL_HEADS)):
            for name, width in numbers.items():
                if "hidden" in name and WIDTH.fullmatch(name) and numbers[heads] * numbers[head] == width:
                    yield level, heads, head, name


def _keep(spaces: list[tuple[Level, str, str, str]], relations: list[tuple[Level, str, str, str]]) -> None:
    """Give heads of state spaces their widths. Raises ValueError if other heads are no longer as wide as they were."""
    for level, heads, head, factor in spaces:
        level[head] = level["hidden_size"] * level[factor] // level[heads]
    for level, heads, head, width in relations:
        if level[heads] * level[head] != level[width]:
            raise ValueError(f"{width} is no longer {heads} by {head}")


def _attention(level: Level) -> tuple[int, int, int]:
    """(query heads, their width together, the width of one); 0 if the level has none."""
    counts = [level[name] for name in HEADS if isinstance(level.get(name), int) and level[name]]
    heads = math.lcm(*counts) if counts else 0
    hidden = next((level[name] for name in HIDDEN if isinstance(level.get(name), int)), 0)
    widths = _head_widths(level)
    if not heads or hidden % heads:
        heads = hidden = 0
    named = [width for name, width in widths if name in OF_ALL_HEADS] or [width for _, width in widths]
    return heads, hidden, min(named) if named else hidden // (heads or 1)


def _head_widths(level: Level) -> list[tuple[str, int]]:
    """The fields that are the width of a head."""
    return [(name, level[name]) for name in level if HEAD_WIDTH.fullmatch(name) and level[name]]


def _shrink_heads(level: Level, scale: float) -> None:
    """Multiply the fields about one head by `scale`."""
    for name, value in level.items():
        if (HEAD_WIDTH.fullmatch(name) or name in SCALARS) and value:
            level[name] = round(value * scale)
    for rope in _dicts(level):
        for name, values in rope.items():
            if name == "mrope_section":  # parts of half a head: their sum counts
                rope[name] = fit_sections(round(sum(values) * scale), values)
            elif isinstance(values, list) and values and all(isinstance(value, float | int) for value in values):
                count = max(1, round(len(values) * scale))  # a factor for every pair of features
                rope[name] = [values[index * len(values) // count] for index in range(count)]


def _rotates(width: int, level: Level) -> bool:
    """True if the rotated part of a head of `width` features consists of pairs, and its key is no narrower than heads
    are."""
    if width * level.get("qk_dim_factor", 1) < HEAD_WIDTHS[0]:
        return False
    factors = [found[name] for found in (level, *_dicts(level)) for name in ROTATED if found.get(name)]
    return all(int(width * factor) >= 2 and int(width * factor) % 2 == 0 for factor in factors)


def _dicts(level: Level) -> Iterator[Level]:
    """Fields about rotation, for all layers or for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = level.get(name)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))
