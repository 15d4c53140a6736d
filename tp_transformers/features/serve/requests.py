"""Requests to the server: what each may ask, and its settings of sampling; everything else is answered with 400."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NoReturn

import torch
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, CBWorkerDeadError, GenerationState

from ...errors import describe, shown
from ...patches import replace
from ..command_line.models import most_tokens

UNHEARD = {"frequency_penalty", "logit_bias", "stop"}
"""Fields that transformers' server reads, and its continuous batching ignores."""
WITHOUT_EFFECT = {"metadata", "parallel_tool_calls", "service_tier", "store", "stream_options", "user"}
"""Fields that change no answer."""
DEFAULTS = {
    "best_of": 1,
    "modalities": ["text"],
    "n": 1,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
}
"""Values of ignored fields that say what the server does anyway; so do None, False, 0 and empty ones."""
TEXTS = {"text", "input_text", "output_text"}
"""Types of the parts of a message."""
ALONE = {"num_beams": 1, "num_return_sequences": 1, "stop_strings": None, "max_time": None}
"""Settings of generation that only one value of is served."""

_settings: ContextVar[Any] = ContextVar("settings of the request that is answered")


def refuse(subject: str, *, got: str, expected: str, fix: str) -> NoReturn:
    """Answer with 400 and the reason."""
    text = describe(subject, got=got, expected=expected, fix=fix)
    raise import_module("fastapi").HTTPException(status_code=400, detail=text)


def explained(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`build_server`, whose errors have the form that OpenAI's client shows."""
    app, fastapi = original(*args, **kwargs), import_module("fastapi")

    async def explain(_: Any, error: Any) -> Any:
        answer = {"error": {"message": str(error.detail), "type": "invalid_request_error"}}
        return import_module("fastapi.responses").JSONResponse(answer, status_code=error.status_code)

    app.add_exception_handler(fastapi.HTTPException, explain)
    return app


def check_fields(body: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Refuse fields that would be ignored, and messages with more than text. `ignored`: as transformers lists them."""
    for name in sorted((UNHEARD.union(ignored) & body.keys()) - WITHOUT_EFFECT):
        value = body[name]
        if value and value != DEFAULTS.get(name):
            refuse(name, got=shown(value), expected="a field that this server has", fix="Leave it out.")
    entries = [entry for name in ("messages", "input") if isinstance(body.get(name), list) for entry in body[name]]
    contents = [entry.get("content") for entry in entries if isinstance(entry, Mapping)]
    for part in (part for content in contents if isinstance(content, list) for part in content):
        kind = part.get("type") if isinstance(part, Mapping) else shown(part)
        if kind not in TEXTS:
            refuse("content of a message", got=f"type {kind}", expected="text", fix="Send text alone.")


def sampling(config: Any) -> dict[str, Any]:
    """Arguments of a request's logits processors for a generation config, as of `batches.processors`."""
    if not config.do_sample:
        return {"is_greedy": True}
    return {
        "temperature": float(config.temperature or 1),
        "top_k": int(config.top_k or torch.iinfo(torch.int32).max),
        "top_p": float(1 if config.top_p is None else config.top_p),
    }


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that ends an answer in the chat template of a tokenizer; None if there is none."""
    answer, text = "An answer.", ""
    talk = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    with suppress(ValueError, TypeError, import_module("jinja2").TemplateError):  # no template, or one for other talks
        text = tokenizer.apply_chat_template(talk, tokenize=False)
    after = tokenizer.encode(text.partition(answer)[2].lstrip(), add_special_tokens=False)
    added = tokenizer.added_tokens_decoder
    return after[0] if after and after[0] in added and added[after[0]].special else None


class Answers:
    """Changes of transformers' server in this process, with which it answers by the batches of all ranks.

    Methods take the original function, then its arguments.
    """

    def __init__(self, model: Any, manager: Any, room: int) -> None:
        """`manager`: the continuous batching of `model`, which runs. `room`: most tokens of a prompt and its answer."""
        self.model, self.manager, self.room = model, manager, room
        self._known = {*self._processors(model.generation_config), "TemperatureLogitsWarper", "TopKLogitsWarper"}
        self._known.add("TopPLogitsWarper")

    def begin(self) -> None:
        """Make the changes, for the rest of the process."""
        for module in ("chat_completion", "completion", "response"):
            import_module(f"transformers.cli.serving.{module}")
        for handler in BaseHandler.__subclasses__():
            if "_build_generation_config" in vars(handler):
                replace(handler, "_build_generation_config", self.build)
        replace(import_module("transformers.cli.serving.server"), "build_server", explained)
        replace(BaseHandler, "_validate_request", self.validate)
        replace(ModelManager, "_load_processor", self.processor)
        replace(CBGenerateManager, "__init__", self.take)
        replace(CBGenerateManager, "init_cb", lambda original, handler, model, config: _settings.set(config))
        replace(CBGenerateManager, "generate_non_streaming", self.generate)
        replace(type(self.manager), "add_request", self.add)
        if self.model.tp_size > 1:
            replace(GenerationState, "get_manager", self.batched)

    def processor(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """`_load_processor`, whose end tokens end answers, too: a model's config does not always list them."""
        processor, config = original(*args, **kwargs), self.model.generation_config
        own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        tokenizer = getattr(processor, "tokenizer", processor)
        ends = [*own, tokenizer.eos_token_id, end_of_turn(tokenizer)]
        config.eos_token_id = [token for token in dict.fromkeys(ends) if token is not None] or None
        return processor

    def validate(self, original: Any, handler: Any, body: dict[str, Any]) -> Any:
        """`_validate_request`, which refuses what would be ignored."""
        check_fields(body, handler._unused_fields)
        return original(handler, body)

    def build(self, original: Any, handler: Any, body: dict[str, Any], default: Any, *args: Any, **kwargs: Any) -> Any:
        """`_build_generation_config`, with the end tokens of the model; refuses settings that have no effect."""
        try:
            config = original(handler, body, default, *args, **kwargs)
            given = json.loads(body.get("generation_config") or "{}")
            if "do_sample" not in given and config.temperature != 0 and (body.get("temperature") or body.get("top_p")):
                config.do_sample = True
            for name in ("eos_token_id", "pad_token_id"):  # a config from elsewhere does not know the model's
                if getattr(config, name) is None:
                    setattr(config, name, getattr(default, name))
            others = self._processors(config) - self._known
        except (TypeError, ValueError, RuntimeError) as error:
            got = str(error).rstrip(".")
            refuse("settings of generation", got=got, expected="valid ones", fix="Correct the request.")
        others |= {name for name, only in ALONE.items() if (getattr(config, name, None) or only) != only}
        if others:
            got = ", ".join(sorted(others))
            refuse("settings of generation", got=got, expected="temperature, top_k and top_p", fix="Leave them out.")
        return config

    def take(self, original: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        """`CBGenerateManager.__init__`, which starts with the batches that run."""
        original(batches, *args, **kwargs)
        batches._cb = self.manager

    def add(self, original: Any, manager: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """`add_request` with the request's settings of sampling; refuses a prompt that has no room."""
        config, length = _settings.get(), len(input_ids)
        room = min(self.room, most_tokens(self.model.config) or self.room)
        if not 0 < length < room:
            fix = "Send a shorter prompt, or serve with more --cb-num-blocks, up to the model's own context."
            fix = fix if length else "Send a text."
            refuse("prompt", got=f"{length} tokens", expected=f"between 1 and {room - 1}", fix=fix)
        # The handler reads from the config whether an answer has reached its length.
        config.max_new_tokens = kwargs["max_new_tokens"] = min(config.max_new_tokens or room, room - length)
        return original(manager, input_ids, *args, **kwargs, **sampling(config))

    async def generate(self, original: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
        """`generate_non_streaming`, which answers with 503 if the server ends first."""
        try:
            return await original(batches, *args, **kwargs)
        except RuntimeError as error:
            if not self.manager.background_thread_status.local_status:
                raise
            raise CBWorkerDeadError("the server ends before this answer is complete") from error

    def batched(self, original: Any, state: Any, model_id: str, use_cb: bool = False) -> Any:
        """`GenerationState.get_manager`, which refuses to call the model on rank 0 alone."""
        if not use_cb:
            fix = "Ask /v1/chat/completions, /v1/completions or /v1/responses of a language model."
            refuse("endpoint", got="one that calls the model on one rank", expected="one that all follow", fix=fix)
        return original(state, model_id, use_cb=use_cb)

    def _processors(self, config: Any) -> set[str]:
        """Names of the logits processors that a generation config asks for."""
        return {type(processor).__name__ for processor in self.model._get_logits_processor(config)}
