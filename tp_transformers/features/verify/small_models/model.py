"""A small random model, its inputs and a record of its outputs; identical in one process and on every rank."""

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

from ....marks import untyped
from .inputs import ORDINARY_IDS, Medium, Prompts, about, candidates, media
from .trace import Trace, traced

PROMPT = 7
"""Tokens of a prompt; longer than the windows of a config from `shrink`."""
NEW_TOKENS = 6
FURTHER = ((1, 1), (1, 9), (2, 1), (2, 7), (3, 11), (4, 12))
"""(rows, tokens) of the batches of `further_answers`."""
SPREAD = 1.6
"""Ratio of the standard deviations of a random linear's outputs and inputs; large enough that logits and attention
differ clearly between tokens."""


@dataclass
class Observation:
    """Results of one process or one rank."""

    trace: Trace = field(default_factory=Trace)
    logits: Tensor | None = None
    loss: Tensor | None = None
    tokens: Tensor | None = None
    further: dict[str, Tensor] = field(default_factory=dict)
    """Results of `further_answers`, if bits are compared."""
    errors: dict[str, float] | None = None
    gradients: dict[str, Tensor] | None = None
    """Unsharded gradients; on a rank, only the wrong ones."""
    doing: str = "loading"
    """The current step."""
    failure: str | None = None
    """Message of the exception, if one was raised."""


def make(cls: type[PreTrainedModel], config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Make a random fp32 model. Norms and biases are random too, so that errors in them show.

    Parameters that are not saved, such as sinusoidal positions, keep the values of the class.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = cls(config).eval().float()
    unsaved = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not param.numel() or any(pattern.search(name) for pattern in unsaved):
                continue
            if is_of_norm_or_bias(name, param.ndim):
                size = float(param.abs().max())  # of scales such as nGPT's, 0.02, a relative change; of zeros, any
                param.add_(torch.randn_like(param) * 0.2 * (size if 0.01 < size < 1 else 1))
            else:
                width = min(param.shape[-2:]) if param.ndim < 4 else param[0].numel()
                param.normal_(std=SPREAD * width**-0.5)
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer) * 0.2)
    return model


class _Doubled(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of torch functions."""

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
    """Multiply rows of `x: (rows, in)` by their group's matrix; `weights: (groups, in, out)`, `ends: (groups,)`."""
    stops = ends.tolist()
    products = [x[start:stop] @ weight for start, stop, weight in zip([0, *stops], stops, weights, strict=False)]
    return torch.cat([*products, x.new_zeros(x.shape[0] - stops[-1], weights.shape[-1])])


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let models compute in `dtype` end to end; for float64, casts to float32 within a forward become float64.

    A gated delta rule casts to float32, and amplifies rounding errors of sums by thousands: in float32, correct ranks
    could not be distinguished from wrong ones.
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


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Let torch compute on `count` threads: bits depend on their number. None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast all parameters of a loaded model to float32 or float64, also those that their class keeps in fp32.

    A narrower dtype changes nothing: a load keeps those in fp32.
    """
    if dtype.itemsize >= 4 and any(param.is_floating_point() and param.dtype != dtype for param in model.parameters()):
        model.double() if dtype == torch.float64 else model.float()  # `to` would make complex buffers real


def in_dtype(question: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast the floating-point arguments of a forward to `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in question.items()}


def questions(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """(arguments of the forward, arguments of generate, True if there is an image or sound) of a batch of two texts.

    The first of these that the model accepts: images and sound, one of them, text padded on the left, text without
    padding.
    """
    texts = _texts(model)
    attached = [medium for name in media(model) if (medium := _medium(model, texts[0], name)) is not None]
    for chosen in (attached, attached[:1], attached[1:]):
        candidate = about(model, texts[0][0], chosen)
        if chosen and (chosen == attached[:1] == attached or _answers(model, candidate)):
            return *candidate, True
    *earlier, last = texts
    text = next((text for text in earlier if _answers(model, text)), last)
    return *text, False


def _texts(model: PreTrainedModel) -> list[Prompts]:
    """Two batches: texts of two lengths, padded on the left, and texts of the same length."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    ids = torch.randint(ORDINARY_IDS.start, ORDINARY_IDS.stop, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(PROMPT) >= torch.tensor([[3], [0]])).long()
    padded = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    return [about(model, text, ()) for text in (padded, {"input_ids": ids})]


def _medium(model: PreTrainedModel, text: Prompts, name: str) -> Medium | None:
    """Two images or sounds of a shape that the model accepts; None if it accepts no usual shape."""
    for medium in candidates(model, name):
        if _answers(model, about(model, text[0], (medium,))):
            return medium
    return None


def _answers(model: PreTrainedModel, prompts: Prompts) -> bool:
    """True if the model returns finite logits for a question, and generates for its prompt."""
    question, prompt = prompts
    try:
        with torch.no_grad():
            finite = bool(answer(model, question).isfinite().all())
        generate(model, prompt, 2)
    except Exception:  # it needs other arguments
        return False
    return finite


def labels(model: PreTrainedModel, question: Mapping[str, Tensor]) -> Tensor | None:
    """The tokens of a question as labels, special tokens ignored; None if the model has no loss for them."""
    ids = question.get("decoder_input_ids", question.get("input_ids"))
    if ids is None or model.get_output_embeddings() is None:
        return None
    ignored = (ids < ORDINARY_IDS.start) | (ids >= ORDINARY_IDS.stop)
    masked = ids.masked_fill(ignored, -100)
    try:
        with torch.no_grad():
            loss = loss_of(model, question, masked)
    except Exception:  # it needs other labels
        return None
    return masked if isinstance(loss, Tensor) and loss.isfinite() else None


def loss_of(model: PreTrainedModel, question: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    loss: Tensor = model(**question, labels=labels)["loss"]
    return loss


def observe(
    model: PreTrainedModel,
    questions: Sequence[dict[str, Tensor]],
    observation: Observation,
    labels: Tensor | None = None,
) -> None:
    """Record the outputs of a model for `questions` (forward, generate) in `seen`, up to an exception."""
    observation.doing = "answering"
    with torch.no_grad(), traced(model, observation.trace):
        observation.logits = answer(model, questions[0])
    if labels is not None:
        observation.doing = "computing the loss"
        with torch.no_grad():
            observation.loss = loss_of(model, questions[0], labels)
    observation.doing = "generating"
    observation.tokens = generate(model, questions[1])


def answer(model: PreTrainedModel, question: dict[str, Tensor]) -> Tensor:
    """The logits of a model, or its hidden states if it has no head."""
    outputs: Any = model(**question)
    logits: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
    return logits


def generate(model: PreTrainedModel, question: dict[str, Tensor], count: int = NEW_TOKENS) -> Tensor | None:
    """Generate greedily, with the KV cache; None if the model does not generate."""
    if not model.can_generate():
        return None
    generating: Any = model
    tokens: Tensor = generating.generate(**question, max_new_tokens=count, do_sample=False)
    return tokens


def further_answers(model: PreTrainedModel, question: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logits of batches of other sizes and of the last position, with weights that learn and frozen ones, and those of
    `generate`; {} for a question with more than text.

    Kernels depend on the number of rows. torch multiplies all rows at once, or each sample by itself, by the strides of
    the input and by whether a weight requires a gradient.
    """
    if "input_ids" not in question or not question.keys() <= {"input_ids", "attention_mask", "decoder_input_ids"}:
        return {}
    ids, seen = question["input_ids"].repeat(2, 2), {}
    keeps: dict[str, Any] = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    )
    learning = [param for param in model.parameters() if param.requires_grad]
    for is_frozen in (False, True):
        for param in learning:
            param.requires_grad_(not is_frozen)
        for rows, length in FURTHER:
            text = {"input_ids": ids[:rows, :length]}
            texts = {**text, **({"decoder_input_ids": text["input_ids"]} if "decoder_input_ids" in question else {})}
            name = f"{rows} x {length} tokens" + " with frozen weights" * is_frozen
            with torch.no_grad():
                seen[name] = answer(model, texts)
                seen[f"the last of {name}"] = answer(model, texts | keeps) if keeps else seen[name]
            if model.can_generate() and length > 1 and not is_frozen:
                options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
                output = untyped(model).generate(**text, **options, return_dict_in_generate=True)
                seen[f"tokens after {name}"] = torch.stack(output.logits)
    for param in learning:
        param.requires_grad_()
    return seen


def gradients(model: PreTrainedModel, question: dict[str, Any], labels: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients of a randomly weighted mean of the logits, plus the loss if there are labels.

    Runs without a cache: some models overwrite its states in place.
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


def is_of_norm_or_bias(name: str, ndim: int) -> bool:
    """True if a parameter of that name is a norm's or a bias: a new model initialises it with a constant."""
    return ndim < 2 or "norm" in name or "bias" in name.rpartition(".")[2]
