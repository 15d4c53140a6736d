"""Report of `plan` as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ...anatomy import folded, layer_number
from ...errors import size, spans
from ...plans.yaml_file import available_plans
from ..command_line.models import most_tokens
from .fit import MOST_RANKS, Room
from .memory import MemoryPlan, Parameter, draft_bytes
from .speed import Speed, speed_lines
from .survey import Survey
from .tables import columns, fold, terminal_width

T = TypeVar("T")
Tree = dict[str, Any]
"""Name -> subtree; "" -> cells of a module's or parameter's line: unsharded shape, shapes on the ranks, strategy."""
_NO_CELLS = ("", "", "")


def as_text(planned: MemoryPlan, room: Room | None, speeds: Sequence[Speed] = ()) -> str:
    """The report in the width of the terminal: memory and speeds first, then the shards of the model."""
    width = terminal_width()
    titles = ("", "full", "on every rank" if planned.size > 1 else "on the rank", "strategy")
    sections = [
        _head(planned),
        [*columns(table(planned, room), right=True, width=width), *_verdict(planned, room)],
        speed_lines(speeds, width=width),
        _caches(planned),
        columns([titles, *tree(planned)], width=width),
        (f"{_REPLICATED}{line}" for line in (replicated_lines(planned) if planned.size > 1 else ())),
    ]
    folded = [[row for line in lines for row in _fold(line, width)] for lines in sections]
    return "\n\n".join("\n".join(lines) for lines in folded if lines)


_REPLICATED = "replicated  "
_COMPLETE = ("local", "grouped_gemm", "moe_all_to_all")
"""Strategies of experts that are complete on one rank."""


def _fold(line: str, width: int) -> list[str]:
    """Fold a line; continuation lines are aligned with its second column."""
    column = re.match(r"\s*\S+(?: \S+)*\s{2,}", line) or re.match(r"\s*", line)
    assert column is not None
    return fold(line, width, column.end() or 2)


def _head(planned: MemoryPlan) -> Iterator[str]:
    survey = planned.survey
    kind = f"{type(survey.model).__name__} ({survey.model.config.model_type}) in {dtype_name(survey.model.dtype)}"
    yield f"{survey.name}: {kind} on {_counted(planned.size, 'rank')}"
    shipped = survey.plan.source in map(str, available_plans().values())
    yield f"plan        {'model_plans/' + os.path.basename(survey.plan.source) if shipped else survey.plan.source}"
    yield from _checkpoint(survey)
    yield from (f"experts     {line}" for line in _balance(planned))
    yield from (f"note        {note}" for note in planned.notes)


def _balance(planned: MemoryPlan) -> Iterator[str]:
    """Lines about complete experts: their numbers on the ranks, and the load of the fullest under an even routing."""
    layouts = (each.layout for each in planned.parameters if each.strategy in _COMPLETE)
    for split in dict.fromkeys(layout.split for layout in layouts if layout is not None and layout.dim == 0):
        numbers, most = ", ".join(map(str, split.widths)), max(split.widths) * split.size / split.length
        yield f"{numbers} of {split.length}: with an even routing, the fullest rank computes {most:.2f} times the mean"


def _verdict(planned: MemoryPlan, room: Room | None) -> Iterator[str]:
    drafts = draft_bytes(planned)
    if drafts is not None:
        yield f"generate(use_mtp=True) adds the layers that draft tokens: {_sizes(drafts)}"
    yield "not counted: activations, long prompts while they are read, the GPU's runtime"
    if room is not None:
        held, memory = max(zip(planned.total_bytes, room.memory, strict=True), key=lambda pair: pair[0] / pair[1])
        verdict = "it fits" if room.fits else "it does not fit"
        yield f"{verdict}: the fullest rank holds {size(held)} of {size(memory)} ({held / memory:.0%})"
        if room.fits and room.context:
            limit = ", all that the model takes" * (room.context == most_tokens(planned.survey.model.config))
            yield f"the longest context: {_counted(room.context, 'token')}{limit}"
    if room is not None and room.is_even:
        answer = _counted(room.smallest, "rank") if room.smallest else f"none up to {MOST_RANKS} ranks"
        yield f"the smallest number of ranks that fits: {answer}"
    elif room is not None and room.fits:
        yield f"load it with tp_shares={list(planned.survey.plan.shares or ())}"
    if room is not None:
        yield from (f"it would fit with {remedy}" for remedy in room.remedies)


def _caches(planned: MemoryPlan) -> Iterator[str]:
    if planned.cached:
        sequences = f"{_counted(planned.batch, 'sequence')} of {_counted(planned.context, 'token')}"
        yield f"KV cache of {sequences} in {dtype_name(planned.survey.model.dtype)}"
        yield from (f"  {line}" for line in cache_lines(planned))
    yield from state_lines(planned)


def _checkpoint(survey: Survey) -> Iterator[str]:
    """Lines about the checkpoint: its size, missing tensors and unexpected tensors."""
    stock = survey.stock
    if stock is None:
        yield "checkpoint  none: shapes and dtypes are those of the config"
        return
    complete = "" if stock.missing else "; it has all that the model needs"
    yield (
        f"checkpoint  {_counted(stock.files, 'file')}, {size(stock.nbytes)}, of which {size(stock.bytes_read)} of "
        f"headers were read{complete}"
    )
    for label, names in (
        ("it lacks, and a load would initialise anew", stock.missing),
        ("it also holds, and a load would leave out", stock.unexpected),
        (
            "it holds both of a tied pair, counted once; a load keeps both if they differ",
            [" = ".join(pair) for pair in stock.twice],
        ),
        ("every rank reads all of these to convert them", stock.read_in_full),
    ):
        if names:
            more = f", and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"            {label}: {', '.join(names[:5])}{more}"


def tree(planned: MemoryPlan) -> list[tuple[str, ...]]:
    """Rows of a tree of parameters, (indented name, cells); equal layers and ranks with equal shapes are folded."""
    root: Tree = {}
    for parameter in planned.parameters:
        on_ranks = [_shape(parameter.local_shape(rank)) for rank in range(planned.size)]
        _put(root, parameter.name, (_shape(parameter.shape), by_rank(on_ranks), _how(parameter)))
    for heads in planned.heads:
        on_ranks = [f"{query}/{kv} heads" for query, kv in heads.ranks]
        _put(root, heads.name, ("{}/{} heads".format(*heads.unsharded), by_rank(on_ranks), ""))
    return list(_lines(_folded(root), 0))


def _put(tree: Tree, name: str, cells: tuple[str, ...]) -> None:
    for step in name.split("."):
        tree = tree.setdefault(step, {})
    tree[""] = cells


def _folded(tree: Tree) -> Tree:
    """Fold equal numbered children into one, labelled with their numbers."""
    kinds: list[tuple[Any, list[str]]] = []
    for name, child in tree.items():
        folded = _folded(child) if name else child
        equal = (names for kind, names in kinds if name.isdigit() and names[0].isdigit() and kind == folded)
        names = next(equal, None)
        if names is None:
            kinds.append((folded, [name]))
        else:
            names.append(name)
    return {spans(map(int, names)) if names[0].isdigit() else names[0]: folded for folded, names in kinds}


def _lines(tree: Tree, depth: int) -> Iterator[tuple[str, ...]]:
    for name, child in tree.items():
        if not name:
            continue
        label = "  " * depth + name
        while "" not in child and len(child) == 1:  # an only child
            ((step, child),) = child.items()
            label = f"{label}.{step}"
        if "" not in child and all(re.fullmatch(r"[\d, -]+", step) for step in child):  # a stack with different layers
            for step, layer in child.items():
                yield (f"{label}.{step}", *layer.get("", _NO_CELLS))
                yield from _lines(layer, depth + 1)
            continue
        yield (label, *child.get("", _NO_CELLS))
        yield from _lines(child, depth + 1)


def table(planned: MemoryPlan, room: Room | None = None) -> list[tuple[str, ...]]:
    """A row of titles, then a row for ranks with equal values: heads, if the same in all attention, and bytes.

    Weights are parameters and buffers. Shares, training and memory have columns if there are any.
    """
    counts = {heads.ranks for heads in planned.heads}
    heads = [f"{query}/{kv}" for query, kv in counts.pop()] if len(counts) == 1 else ["-"] * planned.size
    total, shares = planned.total_bytes, planned.survey.plan.shares
    by_title: dict[str, Sequence[str]] = {
        "query/KV heads": heads,
        "weights": [size(nbytes + planned.buffer_bytes) for nbytes in planned.parameter_bytes],
        "KV cache": list(map(size, planned.cache_bytes)),
    }
    if shares is not None:
        by_title = {"share": [f"{share / sum(shares):.1%}" for share in shares], **by_title}
    if planned.optimizer is not None:
        by_title["training"] = list(map(size, planned.training_bytes))
    by_title["total"] = list(map(size, total))
    if room is not None and not room.is_even:
        by_title["memory"] = list(map(size, room.memory))
        left = [memory - held for memory, held in zip(room.memory, total, strict=True)]
        by_title["left"] = [size(nbytes) if nbytes >= 0 else f"-{size(-nbytes)}" for nbytes in left]
    rows = list(zip(*by_title.values(), strict=True))
    return [("", *by_title), *((f"{_ranks(ranks)}", *row) for row, ranks in _ranks_by_value(rows).items())]


def cache_lines(planned: MemoryPlan) -> list[str]:
    """Lines about the KV cache: layers, and their tokens."""
    described = ((cached.name, f"{cached.tokens} tokens") for cached in planned.cached)
    return [f"{layers}: {tokens}" for layers, tokens in _by_layer(described)]


def state_lines(planned: MemoryPlan) -> list[str]:
    """Lines about the states of mixers: layers, and the bytes of a layer on every rank."""
    unknown = "not known, and not counted: "
    described = (
        (states.name, unknown + states.reason if states.nbytes is None else _sizes(states.nbytes))
        for states in planned.states
    )
    return [f"states of {layers}: {held}" for layers, held in _by_layer(described)]


def _by_layer(described: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(names of equal layers with their numbers, description) of descriptions by name."""
    for pattern, by_text in folded(described).items():
        for text, names in by_text.items():
            yield pattern.replace("*", spans(layer_number(name) or 0 for name in names), 1), text


def replicated_lines(planned: MemoryPlan) -> list[str]:
    """Lines about replicated parameters: bytes, number and reason."""
    held: dict[str, list[int]] = {}
    for parameter in planned.parameters:
        if parameter.replicated_because is not None:
            held.setdefault(parameter.replicated_because, []).append(parameter.nbytes)
    return [f"{size(sum(nbytes))} in {len(nbytes)} parameters: {why}" for why, nbytes in held.items()]


def _shape(lengths: Sequence[int]) -> str:
    return " x ".join(map(str, lengths)) or "scalar"


def by_rank(values: Sequence[str]) -> str:
    """Values with their ranks; the value alone if all ranks have the same."""
    ranks_by_value = _ranks_by_value(values)
    if len(ranks_by_value) == 1:
        return values[0]
    return ", ".join(f"{value} ({_ranks(ranks)})" for value, ranks in ranks_by_value.items())


def _sizes(nbytes: Iterable[int]) -> str:
    """Bytes on every rank."""
    return by_rank(list(map(size, nbytes)))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def _ranks_by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """Value -> the ranks that have it."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _how(parameter: Parameter) -> str:
    """Strategy of a parameter, or the reason why it is replicated; indices on several ranks; tied names."""
    words = [f"full: {parameter.replicated_because}" if parameter.replicated_because else str(parameter.strategy)]
    split = parameter.layout and parameter.layout.split
    if split and (counts := {len(entry.ranks) for rank in range(split.size) for entry in split.shared(rank)}):
        words.append(f"some of it on {' or '.join(map(str, sorted(counts)))} ranks at once")
    if parameter.tied:
        words.append(f"tied to {', '.join(parameter.tied)}")
    return "; ".join(words)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, as in configs."""
    return str(dtype).removeprefix("torch.")
