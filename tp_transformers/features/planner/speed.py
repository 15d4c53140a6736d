"""Speed of a planned load: seconds of a decode step and of a prompt, from bytes, products and all-reduces.

    a forward takes  max(bytes / bandwidth, products / FLOPs) of the slowest rank + all-reduces + gaps of layers

The bytes of a decode step are those of the weights that it reads (of experts, those that its tokens are expected to
choose), and of the keys, values and states of its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ...anatomy import first_of
from ...errors import PlanError
from ...ranks.limits import visible_cores
from .devices import CPU, Device, are_alike
from .fit import refit
from .kv_cache import cached_widths, decoder_name
from .measured import this_machine
from .memory import MemoryPlan, Parameter, replan
from .tables import columns

CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "experts_per_token", "moe_k", "moe_top_k")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config fields with the number of experts that a token chooses, and of all experts of a layer."""
FILLED = 0.98
"""Fraction of a memory that is filled: heads are complete, so that shares lead to some bytes more or fewer."""
PROMPT = 512
"""Tokens of a prompt if there is no context."""
SIZES = (1, 2, 3, 4, 6, 8)
"""Numbers of like devices that are compared, beside the planned one."""


class Times(NamedTuple):
    """Seconds of the parts of a forward on the slowest rank; reads and products are at the same time."""

    reads: float
    products: float
    sums: float
    gaps: float

    @property
    def seconds(self) -> float:
        return max(self.reads, self.products) + self.sums + self.gaps

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        names = ("memory", "products", "all-reduces", "gaps")
        return names[max(range(4), key=self.__getitem__)]


@dataclass(frozen=True)
class Speed:
    """Speed of a model on some devices."""

    planned: MemoryPlan
    devices: tuple[Device, ...]
    decode: Times
    prefill: Times

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.planned.context or PROMPT

    @property
    def decoded(self) -> float:
        """Tokens a second of all sequences."""
        return self.planned.batch / self.decode.seconds

    @property
    def prefilled(self) -> float:
        return self.planned.batch * self.prompt / self.prefill.seconds

    @property
    def fits(self) -> bool:
        """False if a rank needs more than the memory of its device, as far as that is known."""
        pairs = zip(self.planned.total_bytes, self.devices, strict=True)
        return all(held <= device.memory or not device.memory for held, device in pairs)


def speed_of(planned: MemoryPlan, devices: Sequence[Device]) -> Speed:
    """The speed of a load on `devices`, one for each rank."""
    decode = _times(planned, devices, 1, planned.cache_bytes)
    prefill = _times(planned, devices, planned.context or PROMPT, (0,) * planned.size)
    return Speed(planned, tuple(devices), decode, prefill)


def compare(planned: MemoryPlan, devices: Sequence[Device]) -> list[Speed]:
    """The speeds of the plan and of other numbers of ranks: up to 8 like devices, or the unlike ones that read fastest.

    Numbers that the plan does not fit are left out; of this machine, those above its cores, too.
    """
    is_cpu, found = devices[0].name == CPU, []
    model, is_packed = planned.survey.model, any(parameter.packed is not None for parameter in planned.parameters)
    has_experts = first_of(EXPERTS, model.config.get_text_config(decoder=True)) is not None
    measure = partial(this_machine, dtype=model.dtype, packed=is_packed, experts=has_experts)
    ordered = sorted(devices, key=lambda device: -device.bandwidth)
    sizes = {*SIZES, planned.size} if are_alike(devices) else set(range(1, planned.size + 1))
    for size in sorted(sizes):
        if is_cpu and size > max(visible_cores(), planned.size):
            break
        others = measure(size) if is_cpu else (ordered * size)[:size]
        try:
            if size == planned.size:
                found.append(speed_of(planned, others if is_cpu else devices))
            else:
                found.append(speed_of(with_fast_shares(planned, others), others))
        except PlanError:  # some plans fit only some numbers of ranks
            continue
    return found


def with_fast_shares(planned: MemoryPlan, devices: Sequence[Device]) -> MemoryPlan:
    """Shares with which unlike `devices` read their weights in the same time, within their memory; even ones if alike.

    Raises PlanError if the plan does not fit so many ranks.
    """
    even = replan(planned, survey=planned.survey.with_shares(None), size=len(devices))
    if are_alike(devices):
        return even
    total, taken = sum(even.total_bytes), [0.0]
    low, high = 0.0, total / min(device.bandwidth for device in devices)
    for _ in range(50):  # the shortest time of reads in which the devices together hold the model
        middle = (low + high) / 2
        taken = [min(FILLED * device.memory or math.inf, middle * device.bandwidth) for device in devices]
        low, high = (low, middle) if sum(taken) >= total else (middle, high)
    return refit(planned, [max(1, int(part)) for part in taken])


def _times(planned: MemoryPlan, devices: Sequence[Device], tokens: int, cached: Sequence[int]) -> Times:
    """Times of a forward of `tokens` of each sequence; `cached`: bytes of its keys and values, on every rank."""
    size, batch = planned.size, planned.batch
    reads, products = [0.0] * size, [0.0] * size
    for parameter, read, computed in _used(planned, batch, tokens):
        for rank, (nbytes, device) in enumerate(zip(parameter.local_bytes(size), devices, strict=True)):
            plain = device.bandwidth, device.flops
            bandwidth, speed = plain if parameter.packed is None else device.packed or plain
            reads[rank] += read * nbytes / bandwidth
            flops = 2 * computed * math.prod(parameter.local_shape(rank)) * (len(parameter.shape) > 1)
            products[rank] += flops / speed
    for rank, device in enumerate(devices):
        reads[rank] += cached[rank] / device.bandwidth
        products[rank] += batch * _attended(planned, rank, tokens) / device.flops
    slowest = max(range(size), key=lambda rank: max(reads[rank], products[rank]))
    config, model = planned.survey.model.config.get_text_config(decoder=True), planned.survey.model
    itemsize, sent = model.dtype.itemsize, 2 * (size - 1) / size
    prefix = _decoder(model)
    summed = [name for name in planned.summed if name.startswith(prefix)]
    nbytes = len(summed) * batch * tokens * config.hidden_size * itemsize + batch * config.vocab_size * itemsize / 2
    link, latency = min(device.link for device in devices), max(device.latency for device in devices)
    sums = (len(summed) + 1) * latency + sent * nbytes / link if size > 1 else 0.0
    gaps = config.num_hidden_layers * max(device.gap for device in devices)
    return Times(reads[slowest], products[slowest], sums, gaps)


def _used(planned: MemoryPlan, batch: int, tokens: int) -> Iterator[tuple[Parameter, float, float]]:
    """(parameter, fraction of it that a forward reads, number of tokens that it is multiplied with)."""
    model = planned.survey.model
    config, names = model.config.get_text_config(decoder=True), {id(m): name for name, m in model.named_modules()}
    embedding, head = (names.get(id(m)) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    chosen, experts, prefix = first_of(CHOSEN, config), first_of(EXPERTS, config), _decoder(model)
    for parameter in planned.parameters:
        owners = {name.rpartition(".")[0] for name in (parameter.name, *parameter.tied)}
        if head in owners:  # of a prompt, the last token has logits
            yield parameter, 1.0, batch
        elif embedding not in owners and parameter.name.startswith(prefix):
            part = chosen / experts if chosen and experts and ".experts." in parameter.name else 1.0
            yield parameter, 1 - (1 - part) ** (batch * tokens), part * batch * tokens


def _decoder(model: PreTrainedModel) -> str:
    """The beginning of the names of the decoder's modules."""
    return f"{decoder_name(model)}.".lstrip(".")


def _attended(planned: MemoryPlan, rank: int, tokens: int) -> float:
    """FLOPs of attention beside its linears, of one sequence; a token of a prompt attends to half of it on average."""
    model, total, prefix = planned.survey.model, 0.0, _decoder(planned.survey.model)
    tokens_of = {cached.name: cached.tokens for cached in planned.cached}
    for heads in (heads for heads in planned.heads if heads.name.startswith(prefix)):
        module = model.get_submodule(heads.name)
        width = cached_widths(module, getattr(module, "config", None) or model.config.get_text_config(decoder=True))[2]
        kept = tokens / 2 if tokens > 1 else tokens_of.get(heads.name, 0)
        total += 4 * tokens * kept * heads.ranks[rank][0] * width
    return total


# -- report

NOT_COUNTED = "other programs, links between machines, and eager forwards on a GPU, which wait for the host"


def speed_lines(speeds: Sequence[Speed], *, width: int) -> Iterator[str]:
    """Lines of a table with a row for each number of ranks, and of the fastest."""
    if not speeds:
        return
    last = speeds[-1]
    yield f"speed of {last.planned.batch} x {last.prompt} tokens: tokens a second, and what bounds them"
    yield from columns([("", "decode", "prompt", "fits"), *map(_row, speeds)], right=True, width=width)
    fitting = [speed for speed in speeds if speed.fits]
    if fitting:
        best = max(fitting, key=lambda speed: speed.decoded)
        shares = best.planned.survey.plan.shares
        given = f" with tp_shares={list(shares)}" if shares else ""
        yield f"decode is fastest on {_counted(best)}{given}, bound by {best.decode.bound}"
    yield f"not counted: {NOT_COUNTED}"


def _row(speed: Speed) -> tuple[str, ...]:
    names = [device.name for device in speed.devices]
    on = names[:1] if are_alike(speed.devices) else names
    cells = (f"{speed.decoded:.1f} ({speed.decode.bound})", f"{speed.prefilled:.0f} ({speed.prefill.bound})")
    return (f"{_counted(speed)}: {', '.join(on)}", *cells, "yes" if speed.fits else "no")


def _counted(speed: Speed) -> str:
    return f"{speed.planned.size} rank{'s' * (speed.planned.size > 1)}"


def speeds_as_json(speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    return [
        {
            "ranks": speed.planned.size,
            "devices": [device.name for device in speed.devices],
            "shares": speed.planned.survey.plan.shares,
            "fits": speed.fits,
            "decode": {"tokens_per_second": speed.decoded, **_seconds(speed.decode)},
            "prefill": {"tokens_per_second": speed.prefilled, **_seconds(speed.prefill)},
        }
        for speed in speeds
    ]


def _seconds(times: Times) -> dict[str, Any]:
    parts = {f"{name}_seconds": seconds for name, seconds in times._asdict().items()}
    return {"bound": times.bound, **parts}
