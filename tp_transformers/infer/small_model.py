"""A small random model, its inputs and a record of its outputs: the same for one process and for every rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from ..anatomy.norms import is_of_norm_or_bias

PROMPT = 7
"""Tokens of a prompt; longer than the windows of a config that `shrink` made."""
NEW_TOKENS = 6
ORDINARY_IDS = range(48, 192)
"""Ids that `shrink` leaves to no special token."""
SPREAD = 1.6
"""Standard deviation of a random linear's outputs by that of its inputs; large enough that logits and attention differ
clearly between tokens."""


@dataclass
class Call:
    """One call of a module, and its floating-point tensors."""

    name: str
    given: Tensor | None
    returned: list[Tensor] = field(default_factory=list)


@dataclass
class Trace:
    """Inputs and outputs of the modules of a model in one forward."""

    calls: list[Call] = field(default_factory=list)
    """Calls in the order in which they returned: a module comes after all inside it."""
    running: list[Call] = field(default_factory=list)
    """Modules that had not returned when the forward raised, from the outside in."""


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


def make(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A random fp32 model, in which no norm is all ones and no bias all zeros, so that each of them matters."""
    torch.manual_seed(0)
    model: PreTrainedModel = cls(config).eval().float()
    with torch.no_grad():
        for name, param in model.named_parameters():
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

    A gated delta rule, whose code casts to float32, multiplies the rounding of sums by thousands: in float32, ranks
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


def in_dtype(question: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of a forward, those of floating point in `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in question.items()}


def questions(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """(arguments of the forward, arguments of generate, whether there is an image) of a left-padded batch of two.

    There is an image if the model takes one in one of the two usual ways: as `pixel_values` of images, or
    of flattened patches with `image_grid_thw`.
    """
    config: Any = model.config
    pad = getattr(config.get_text_config(), "pad_token_id", None) or 0
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(ORDINARY_IDS.start, ORDINARY_IDS.stop, (2, PROMPT), generator=generator)
    mask = (torch.arange(PROMPT) >= torch.tensor([[3], [0]])).long()
    ids = ids.masked_fill(mask == 0, pad)
    text = {"input_ids": ids, "attention_mask": mask}
    if model.main_input_name == "input_features" and hasattr(config, "max_source_positions"):  # two frames a position
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        speech = {"input_features": torch.randn(shape, generator=generator)}
        return {**speech, "decoder_input_ids": ids}, speech, False
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        channels = getattr(config, "num_channels", 3)
        images = {"pixel_values": torch.randn((2, channels, *[config.image_size] * 2), generator=generator)}
        return images, images, True
    if config.is_encoder_decoder:
        return {**text, "decoder_input_ids": ids.flip(1)}, text, False
    image = _image(model, generator)
    if image is None:
        return text, text, False
    features, token, seen = image
    tokens = torch.full((2, features), token)
    seeing = {
        "input_ids": torch.cat([ids[:, :3], tokens, ids[:, 3:]], 1),
        "attention_mask": torch.cat([mask[:, :3], torch.ones_like(tokens), mask[:, 3:]], 1),
        **seen,
    }
    kinds = (seeing["input_ids"] == token).long()
    accepted = inspect.signature(type(model).forward).parameters
    seeing |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
    return seeing, seeing, True


def _image(model: Any, generator: torch.Generator) -> tuple[int, int, dict[str, Tensor]] | None:
    """(tokens of an image, the token that stands for one, arguments) for two images; None if the model takes others."""
    config: Any = model.config
    vision: Any = getattr(config, "vision_config", None)
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    patch = getattr(vision, "patch_size", None)
    if not isinstance(patch, int) or token is None:
        return None
    channels: int = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    if "image_grid_thw" in inspect.signature(type(model).forward).parameters:
        side = 2 * vision.spatial_merge_size
        grid = torch.tensor([[1, side, side]] * 2)
        shape = (2 * side**2, channels * vision.temporal_patch_size * patch**2)
        seen = {"pixel_values": torch.randn(shape, generator=generator), "image_grid_thw": grid}
        return 4, token, seen
    size = getattr(vision, "image_size", None)
    if not isinstance(size, int):
        return None
    seen = {"pixel_values": torch.randn((2, channels, size, size), generator=generator)}
    try:
        with torch.no_grad():
            found: Any = model.get_image_features(**seen)
    except Exception:  # it wants more than an image: then only its text is tried
        return None
    features = getattr(found, "pooler_output", found)
    features = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return features.numel() // features.shape[-1] // 2, token, seen


@contextmanager
def traced(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Record the inputs and outputs of every module while the context lasts, without gradients."""
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, args: Any, keywords: Any) -> None:
        given = next(_tensors((args, keywords)), None)
        trace.running.append(Call(names[id(module)], None if given is None else given.clone()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        call = trace.running.pop()
        call.returned = [value.clone() for value in _tensors(output)]
        trace.calls.append(call)

    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.full_tensor() if isinstance(output, DTensor) else output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


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


def generate(model: PreTrainedModel, question: dict[str, Tensor]) -> Tensor | None:
    """Greedy tokens, with the KV cache; None if the model does not generate."""
    if not model.can_generate():
        return None
    generating: Any = model
    tokens: Tensor = generating.generate(**question, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens


def gradients(model: PreTrainedModel, question: dict[str, Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of the logits' sum, each multiplied by a random number of its own, and of the loss."""
    model.zero_grad()
    logits = answer(model, question)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    total = (logits * weights).mean()
    if labels is not None:
        total = total + loss_of(model, question, labels)
    total.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
