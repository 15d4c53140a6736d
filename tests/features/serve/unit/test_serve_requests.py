"""Requests that `tp-transformers serve` refuses, and the environment of `tp-transformers chat`."""

import copy
import json
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from tests.support.words import words
from tp_transformers.features.serve import chat

fastapi = pytest.importorskip("fastapi")
requests = pytest.importorskip("tp_transformers.features.serve.requests", exc_type=ImportError)

IGNORED = {"n", "best_of", "logprobs", "response_format", "user", "stream_options", "tool_choice"}
"""Some of the fields that transformers' server ignores."""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n: got 2"),
        ({"logprobs": True}, "logprobs: got True"),
        ({"stop": "w9"}, "stop: got 'w9'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: got 0.5"),
        ({"response_format": {"type": "json_object"}}, "response_format: got"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "got type image_url"),
        ({"input": [{"role": "user", "content": ["w5"]}]}, "content of a message: got type 'w5'"),
    ],
)
def test_what_would_be_ignored_is_refused(body, said) -> None:
    with pytest.raises(fastapi.HTTPException) as refused:
        requests.check_fields(body, IGNORED)
    assert refused.value.status_code == 400
    assert said in refused.value.detail


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "best_of": None, "logprobs": False, "stop": [], "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "user": "someone", "stream_options": {"a": True}},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "w5"}]},
                {"role": "user", "content": "w5"},
            ]
        },
        {"temperature": 0.5, "seed": 3, "max_tokens": 5, "prompt": "w5", "input": "w5"},
    ],
)
def test_what_changes_nothing_is_accepted(body) -> None:
    requests.check_fields(body, IGNORED)


def built(body: dict[str, Any]) -> GenerationConfig:
    """The config of a request, of a model with two end tokens."""
    default = GenerationConfig(eos_token_id=[2, 7], pad_token_id=0)
    model = SimpleNamespace(config=LlamaConfig(), generation_config=default, _get_logits_processor=lambda config: [])

    def original(handler: Any, body: dict[str, Any], default: GenerationConfig) -> GenerationConfig:
        text = body.get("generation_config")  # as transformers' handlers do
        config = GenerationConfig(**json.loads(text)) if text else copy.deepcopy(default)
        config.temperature = body.get("temperature", config.temperature)
        return config

    answers = requests.Answers(model, None, 100)
    config: GenerationConfig = answers.build(original, None, body, default)
    return config


def test_a_config_of_the_chat_gets_the_end_tokens_of_the_model() -> None:
    config = built({"generation_config": '{"do_sample": true, "max_new_tokens": 256}'})
    assert (config.do_sample, config.eos_token_id, config.pad_token_id) == (True, [2, 7], 0)
    assert built({"generation_config": '{"eos_token_id": 5}'}).eos_token_id == 5


CLOSED = "{% for message in messages %}{{ message['content'] }}{{ closing }} {% endfor %}"
"""A chat template: `closing` is what follows each message."""


@pytest.mark.parametrize(
    ("configured", "template", "expected"),
    [
        (None, CLOSED.replace("{{ closing }}", " w7 w9"), [5, 7]),
        (2, CLOSED.replace("{{ closing }}", "\nw7"), [2, 5, 7]),
        ([2, 7], CLOSED.replace("{{ closing }}", " w7"), [2, 7, 5]),
        (2, CLOSED.replace("{{ closing }}", " w8"), [2, 5]),  # a word
        (2, "{{ raise_exception('no such talk') }}", [2, 5]),
        (2, "{{ messages[0]['content'][0]['text'] }}", [2, 5]),
        (2, None, [2, 5]),
    ],
)
def test_answers_end_at_the_end_tokens_of_model_tokenizer_and_chat(configured, template, expected) -> None:
    tokenizer = words(10, special="w7", eos_token="w5", chat_template=template)
    config = GenerationConfig(eos_token_id=configured)
    model = SimpleNamespace(config=LlamaConfig(), generation_config=config, _get_logits_processor=lambda config: [])
    for processor in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):
        config.eos_token_id = configured
        requests.Answers(model, None, 100).processor(partial(next, iter([processor])))
        assert config.eos_token_id == expected


def test_a_prompt_longer_than_the_models_context_is_refused(monkeypatch) -> None:
    """A model with learned positions would raise in the batch, and so end the server for all requests."""
    asked: list[int] = []
    config = GenerationConfig(max_new_tokens=50)
    requests._settings.set(config)
    for scaling, most in ((None, 40), ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, 80)):
        text = LlamaConfig(max_position_embeddings=40, rope_parameters=scaling)
        model = SimpleNamespace(config=text, generation_config=config, _get_logits_processor=lambda config: [])
        answers = requests.Answers(model, None, 100)
        for length in (most - 10, most):
            with suppress(fastapi.HTTPException):
                answers.add(lambda manager, ids, max_new_tokens, **_: asked.append(max_new_tokens), None, [1] * length)
    assert asked == [10, 10], "an answer ends with the context"


def test_a_temperature_asks_for_sampling() -> None:
    assert [built(body).do_sample for body in ({"temperature": 0.7}, {"temperature": 0.0}, {})] == [True, None, None]


def test_settings_of_sampling_of_a_request() -> None:
    assert requests.sampling(GenerationConfig(temperature=0.5)) == {"is_greedy": True}
    sampled = requests.sampling(GenerationConfig(do_sample=True, top_p=0.5, top_k=0))
    assert sampled == {"temperature": 1.0, "top_k": 2**31 - 1, "top_p": 0.5}


def test_the_chat_reaches_its_server_past_a_proxy_and_offline() -> None:
    found = chat.reaching({"no_proxy": "a.org", "http_proxy": "http://nowhere:1", "HF_HUB_OFFLINE": "1", "HOME": "/h"})
    direct = "a.org,127.0.0.1"
    assert found == {"no_proxy": direct, "NO_PROXY": direct, "http_proxy": "http://nowhere:1", "HOME": "/h"}
