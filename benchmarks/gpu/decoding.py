"""Decode steps with a static cache: eager, compiled, or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import StaticCache

from ..ranks import prompts
from .device import Device, Step


class Decoder:
    """Greedy decoding with inputs, cache and outputs at fixed addresses, so that a graph can replay a step."""

    def __init__(self, model: Any, device: Device, *, batch: int, prompt: int, room: int) -> None:
        """A batch of random prompts, the same on all ranks: (batch, prompt); `room`: tokens of the cache."""
        self.model, self.device = model.eval(), device
        self.cache = StaticCache(model.config, max_cache_len=room)
        self.prompts = prompts(model.config.vocab_size, batch, prompt).to(model.device)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self.prefill()

    @torch.no_grad()
    def prefill(self) -> None:
        """Empty the cache, and compute the prompts and the first tokens."""
        self.cache.reset()
        logits = self.model(self.prompts, past_key_values=self.cache, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.fill_(self.prompts.shape[1])

    def eager(self) -> Step:
        """One step by the model's own forward."""
        return partial(self._step, self.model)

    def compiled(self) -> Step:
        """One step through torch.compile."""
        return partial(self._step, self.device.compiled(self.model))

    def graph(self) -> Step:
        """One step as a graph of the device."""
        step = self.device.graph(self.eager())
        self.prefill()
        return step

    def tokens(self, step: Step, count: int) -> torch.Tensor:
        """The tokens that `count` steps write after the prompts: (batch, count)."""
        self.prefill()
        written = []
        for _ in range(count):
            step()
            written.append(self.token.clone())
        return torch.cat(written, 1).cpu()

    @torch.no_grad()
    def _step(self, call: Callable[..., Any]) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        logits = call(self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)
