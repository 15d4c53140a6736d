"""A small random model, its inputs and a record of its outputs: the same for one process and for every rank."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from ..anatomy.norms import is_of_norm_or_bias
from .inputs import ORDINARY_IDS, Asked, Medium, about, candidates, media
from .trace import Trace, traced

PROMPT = 7
"""Tokens of a prompt; longer than the windows of a config that `shrink` made."""
NEW_TOKENS = 6
SPREAD = 1.6
"""Standard deviation of a random linear's outputs by that of its inputs; large enough that logits and attention differ
clearly between tokens."""


@dataclass
class Observation:
    """Results of one process or one rank."""

    trace: Trace = field(default_factory=Trace)
    logits: Tensor | None = None
    loss: Tensor | None = None
    tokens: Tensor | None = None
    errors: dict[str, float] | None = None
    gradients: dict[str, Tensor] | None = None
    """Unsharded gradients; for a rank, those that are wrong."""
    doing: str = "loading"
    """Step that it has come to."""
    failure: str | None = None
    """Message of the exception, if one was raised."""


def make(cls: type[PreTrainedModel], config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model; no norm is all ones and no bias all zeros, so that each of them matters.

    Parameters that a checkpoint leaves out, such as sines of positions, are as the class makes them.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = cls(config).eval().float()
    unsaved = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.numel() or any(pattern.search(name) for pattern in unsaved):
                continue
            if is_of_norm_or_bias(name, param.ndim):
                param.add_(torch.randn_like(param) * 0.2)
            else:
                width = min(param.shape[-2:]) if param.ndim < 4 else param[0].numel()
                param.normal_(std=SPREAD * width**-0.5)
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer) * 0.2)
    return model


class _Doubled(TorchFunctionMode):
    """Gives float64 to code that asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        if (
            func is getattr(torch, "_grouped_mm", None) and args[0].dtype == torch.float64
        ):  # not implemented for float64
            return _grouped_product(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x: (rows, in)` by the matrix of their group; `weights: (groups, in, out)`, `ends: (groups,)` of rows."""
    stops = ends.tolist()
    products = [x[start:stop] @ weight for start, stop, weight in zip([0, *stops], stops, weights, strict=False)]
    return torch.cat([*products, x.new_zeros(x.shape[0] - stops[-1], weights.shape[-1])])


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let models of `dtype` compute in it from end to end: with float64, casts to float32 within a forward too.

    A gated delta rule casts to float32 in its code, and multiplies the rounding of sums by thousands: in float32, ranks
    that are right cannot be distinguished from ranks that are wrong.
    """
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)


def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a loaded model's parameters one dtype, float32 or float64, those too that their class keeps in fp32."""
    if any(param.is_floating_point() and param.dtype != dtype for param in model.parameters()):
        model.double() if dtype == torch.float64 else model.float()  # `to` would make complex buffers real


def in_dtype(question: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of a forward, those of floating point in `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in question.items()}


def questions(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """(arguments of the forward, arguments of generate, whether there is an image or sound) of a batch of two texts.

    They are the first that the model answers: with images and sound, with one of them, with text that is padded on the
    left, with text that is not.
    """
    texts = _texts(model)
    found = [medium for name in media(model) if (medium := _medium(model, texts[0], name)) is not None]
    for shown in (found, found[:1], found[1:]):
        asked = about(model, texts[0][0], shown)
        if shown and (shown == found[:1] == found or _answers(model, asked)):
            return *asked, True
    *others, last = texts
    text = next((text for text in others if _answers(model, text)), last)
    return *text, False


def _texts(model: PreTrainedModel) -> list[Asked]:
    """Texts of two lengths, padded on the left; two texts of the same length."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    ids = torch.randint(ORDINARY_IDS.start, ORDINARY_IDS.stop, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(PROMPT) >= torch.tensor([[3], [0]])).long()
    padded = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    return [about(model, text, ()) for text in (padded, {"input_ids": ids})]


def _medium(model: PreTrainedModel, text: Asked, name: str) -> Medium | None:
    """Two images or sounds of a shape that a model takes; None if it takes none of the usual ones."""
    for medium in candidates(model, name):
        if _answers(model, about(model, text[0], (medium,))):
            return medium
    return None


def _answers(model: PreTrainedModel, asked: Asked) -> bool:
    """True if a model has finite logits for a question, and writes to its prompt."""
    question, prompt = asked
    try:
        with torch.no_grad():
            finite = bool(answer(model, question).isfinite().all())
        generate(model, prompt, 2)
    except Exception:  # it wants other arguments
        return False
    return finite


def labels(model: PreTrainedModel, question: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of a question, special ones ignored; None if the model has no loss for them."""
    ids = question.get("decoder_input_ids", question.get("input_ids"))
    if ids is None or model.get_output_embeddings() is None:
        return None
    ignored = (ids < ORDINARY_IDS.start) | (ids >= ORDINARY_IDS.stop)
    found = ids.masked_fill(ignored, -100)
    try:
        with torch.no_grad():
            loss = loss_of(model, question, found)
    except Exception:  # it wants other labels
        return None
    return found if isinstance(loss, Tensor) and loss.isfinite() else None


def loss_of(model: PreTrainedModel, question: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    loss: Tensor = model(**question, labels=labels)["loss"]
    return loss


def observe(
    model: PreTrainedModel, questions: Sequence[dict[str, Tensor]], seen: Observation, labels: Tensor | None = None
) -> None:
    """Record the outputs of a model for the two `questions` in `seen`, as far as it comes."""
    seen.doing = "answering"
    with torch.no_grad(), traced(model, seen.trace):
        seen.logits = answer(model, questions[0])
    if labels is not None:
        seen.doing = "computing the loss"
        with torch.no_grad():
            seen.loss = loss_of(model, questions[0], labels)
    seen.doing = "generating"
    seen.tokens = generate(model, questions[1])


def answer(model: PreTrainedModel, question: dict[str, Tensor]) -> Tensor:
    """The logits of a model, or its states if it has no head."""
    outputs: Any = model(**question)
    logits: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
    return logits


def generate(model: PreTrainedModel, question: dict[str, Tensor], count: int = NEW_TOKENS) -> Tensor | None:
    """Greedy tokens, with the KV cache; None if the model does not generate."""
    if not model.can_generate():
        return None
    generating: Any = model
    tokens: Tensor = generating.generate(**question, max_new_tokens=count, do_sample=False)
    return tokens


def gradients(model: PreTrainedModel, question: dict[str, Any], labels: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of the logits' sum, each multiplied by a random number of its own, and of the loss.

    Without a cache: some models overwrite its states.
    """
    model.zero_grad()
    if "use_cache" in inspect.signature(model.forward).parameters:
        question = {**question, "use_cache": False}
    logits = answer(model, question)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    total = (logits * weights).mean()
    if labels is not None:
        total = total + loss_of(model, question, labels)
    total.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
