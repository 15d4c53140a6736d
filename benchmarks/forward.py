"""One rank of `bench_forward`: compares the sides, then times them alternately."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, StaticCache

import tp_transformers

from .ranks import in_turn, joined, prompts

VOCABULARY = 8000
SHARED = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "pad_token_id": 0}
WIDTHS: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
    "real": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 32},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 32, "num_attention_heads": 4},
}
"""Widths of the models, which have half as many KV heads; the arithmetic of tiny ones is negligible."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen3": {"head_dim": 64},
    "olmo2": {},
}
"""Model types -> config fields in addition to the widths; experts are a quarter as wide as an MLP."""
CUT = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
PROMPT, WRITTEN = 512, 32
TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit; the arithmetic is fp32."""


@dataclass(frozen=True)
class Job:
    """The job of one rank for one model."""

    model: str
    folder: str
    """Temporary folder, for the checkpoint that the first rank writes."""
    size: int
    rank: int
    store: str
    """File for the rendezvous of the ranks; "" with fake collectives."""
    rounds: int
    scenarios: list[str]
    compiled: bool
    widths: str
    cores: int
    """All cores of the machine, for the single process."""


class Timed:
    """One side: a model, and the scenarios to time."""

    def __init__(self, model: Any, job: Job, *, is_alone: bool = False) -> None:
        """`is_alone`: only the first rank computes, with all cores, while the others sleep."""
        self.model, self.job, self.is_alone = model.eval(), job, is_alone
        self.rests = is_alone and job.rank > 0
        self.call = torch.compile(model) if job.compiled else model
        self.clock = time.perf_counter if job.store else time.process_time
        self._caches: dict[str, Any] = {}

    @torch.no_grad()
    def prefill(self, batch: int) -> None:
        self.call(prompts(VOCABULARY, batch, PROMPT), use_cache=True)

    @torch.no_grad()
    def decode(self, cache: str) -> None:
        """Decode eight tokens one by one, after a prefilled prompt."""
        ids = prompts(VOCABULARY, 1, 64)
        if cache == "static":
            kept = self._caches.setdefault(cache, StaticCache(self.model.config, max_cache_len=256))
            kept.reset()
            past = self.model(ids, past_key_values=kept, use_cache=True).past_key_values
        else:
            past = self.model(ids, use_cache=True).past_key_values
        self.start()
        for step in range(8):
            positions = torch.tensor([[64 + step]])
            self.call(ids[:, :1], past_key_values=past, position_ids=positions, use_cache=True)

    def train(self) -> None:
        ids = prompts(VOCABULARY, 1, 128)
        self.call(ids, labels=ids, use_cache=False).loss.backward()
        self.model.zero_grad()

    @torch.no_grad()
    def generate(self) -> None:
        self.model.generate(prompts(VOCABULARY, 1, 64), max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)

    def start(self) -> None:
        """Start the clock, once the ranks are ready."""
        if self.job.store and self.job.size > 1 and not self.is_alone:
            dist.barrier()
        self.began = self.clock()

    def seconds(self, what: Callable[[Timed], None]) -> float:
        """Seconds of one run; with fake collectives, CPU seconds of this process. 0 on an idle rank."""
        if self.is_alone:
            dist.barrier()
        if self.rests:
            return 0.0  # it sleeps in the next barrier
        with self.cores():
            self.start()
            what(self)
            return self.clock() - self.began

    @contextmanager
    def cores(self) -> Iterator[None]:
        """Compute with the cores of this side; torch.compile recompiles for another number of threads."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.job.cores if self.is_alone else threads)
        yield
        torch.set_num_threads(threads)


SCENARIOS: dict[str, Callable[[Timed], None]] = {
    "prefill": lambda side: side.prefill(1),
    "prefill of 8": lambda side: side.prefill(8),
    "decode": lambda side: side.decode("dynamic"),
    "decode with a static cache": lambda side: side.decode("static"),
    "training step": Timed.train,
    "generate": Timed.generate,
}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, for any API that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.counts[name.partition("::")[2].strip("_").replace("allreduce", "all_reduce")] += 1
        return func(*args, **(kwargs or {}))


def on_rank(**job: Any) -> dict[str, Any]:
    """Run a `Job`: errors and refusals by side, seconds and numbers of collectives by scenario and side."""
    given = Job(**job)
    result: dict[str, Any] = {"errors": {}, "refused": {}, "seconds": {}, "collectives": {}}
    with joined(given.store, given.rank, given.size) as mesh:
        sides = _sides(given, mesh, result)
        for name in given.scenarios:
            what = SCENARIOS[name]
            counts = result["collectives"][name] = {}
            for side, timed in sides.items():
                if timed.rests:
                    continue
                with timed.cores():
                    what(timed)  # compiles, and fills caches
                    what(timed)
                with mock.patch.object(timed, "call", timed.model), Collectives() as seen:  # not compiled
                    what(timed)
                counts[side] = seen.counts
            calls = {side: partial(timed.seconds, what) for side, timed in sides.items()}
            result["seconds"][name] = in_turn(calls, given.rounds)
    return result


def _sides(job: Job, mesh: DeviceMesh, result: dict[str, Any]) -> dict[str, Timed]:
    """The models with correct logits, by side."""
    config = config_of(job.model, job.widths)
    torch.manual_seed(0)
    folder = Path(job.folder) / "checkpoint"
    if job.rank == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if job.store:
        dist.barrier()
    sides = {}
    for side in ("ours", "native", "plain"):
        try:
            sides[side] = Timed(_load(side, folder, mesh, job), job)
        except Exception as error:
            result["refused"][side] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if not job.store:
        return sides
    with torch.no_grad():
        ids = prompts(VOCABULARY, 1, PROMPT)
        expected = sides["plain"].model(ids).logits
        for side, timed in list(sides.items()):
            try:
                logits = timed.model(ids).logits
                result["errors"][side] = error = float((logits - expected).abs().max() / expected.abs().max())
                why = f"its logits are wrong (relative error {error:.1e})" if not error < TOLERANCE else ""
            except Exception as fault:
                why = f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"
            if why:
                result["refused"][side] = why
                del sides[side]
    sides["alone"] = Timed(sides["plain"].model, job, is_alone=True)
    return sides


def config_of(model: str, widths: str) -> Any:
    """The config of a model type of MODELS with WIDTHS."""
    shape = {**SHARED, **WIDTHS[widths]}
    shape["num_key_value_heads"] = shape["num_attention_heads"] // 2
    if model == "mixtral":
        shape["intermediate_size"] //= 4
    return CONFIG_MAPPING[model](**{**shape, **MODELS[model]})


def _load(side: str, folder: Path, mesh: DeviceMesh, job: Job) -> Any:
    """The model of one side; with fake collectives, a plain model has the shapes of one rank."""
    if side in ("ours", "native"):
        with tp_transformers.enable() if side == "ours" else nullcontext():
            return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh, dtype=torch.float32)
    if job.store:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = CONFIG_MAPPING[job.model].from_pretrained(folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for field in CUT:
        setattr(config, field, getattr(config, field) // job.size)
    config.head_dim = head_dim
    return AutoModelForCausalLM.from_config(config)
