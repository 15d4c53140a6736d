"""Compiled models: how often torch.compile breaks the graph of a forward, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._guards import CompileContext
from transformers import CompileConfig

from tests.support.architectures import inputs_of
from tests.support.comparisons import gradients

TOKENS = 3
"""Tokens that are generated, all but the first by a decode step that is compiled."""


@dataclass(frozen=True)
class Made:
    """One phase of a model: what it computes and, if it was compiled, in how many graphs."""

    value: Tensor
    """Logits of a prefill, (batch, sequence, vocabulary), or of decode steps, (steps, batch, vocabulary); a loss."""
    tokens: Tensor | None = None
    """The sequences that were decoded."""
    grads: dict[str, Tensor] = field(default_factory=dict)
    graphs: int = 0
    """Places of the code from which a graph goes to the next break, each counted once for all its shapes."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Reason -> number of graph breaks."""


PHASES = ("prefill", "decode", "train")


def observe(model: Any, backend: str | None, phases: Sequence[str] = PHASES) -> dict[str, Made]:
    """A prefill, the decoding of a few tokens with a static cache, a training step; eager without a `backend`."""
    inputs, generated = inputs_of(model)
    frames: set[int | None] = set()

    def compile_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        compile_id = CompileContext.current_compile_id()
        assert compile_id is not None
        assert backend is not None
        frames.add(compile_id.frame_id)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    forward = torch.compile(model, backend=compile_graph) if backend else model

    def prefill() -> Made:
        with torch.no_grad():
            return Made(forward(**inputs).logits)

    def decode() -> Made:
        config = CompileConfig(backend=compile_graph, mode=None)
        config._compile_all_devices = True
        made = model.generate(
            **generated,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            cache_implementation="static",
            compile_config=config if backend else None,
            disable_compile=not backend,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return Made(torch.stack(made.logits), made.sequences)

    def train() -> Made:
        model.train()
        model.zero_grad()
        labels = inputs.get("decoder_input_ids", inputs["input_ids"])
        given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        loss = forward(**given, labels=labels).loss
        loss.backward()
        model.eval()
        return Made(loss.detach(), grads=gradients(model))

    return {call.__name__: _counted(call, frames) for call in (prefill, decode, train) if call.__name__ in phases}


def _counted(call: Callable[[], Made], frames: set[int | None]) -> Made:
    torch._dynamo.reset()
    counters.clear()
    frames.clear()
    made = call()
    breaks = dict(counters["graph_break"])
    torch._dynamo.reset()
    return Made(made.value, made.tokens, made.grads, len(frames), breaks)
