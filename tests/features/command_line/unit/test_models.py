"""The class of a config, and a model without memory."""

from __future__ import annotations

import pytest
import transformers

from tests.support.models import llama_config
from tp_transformers import UnsupportedError
from tp_transformers.features.command_line import models


@pytest.mark.parametrize(
    ("config", "named", "cls", "generating"),
    [
        ("LlamaConfig", ["LlamaForCausalLM"], "LlamaForCausalLM", "LlamaForCausalLM"),
        ("LlamaConfig", ["LlamaModel"], "LlamaModel", "LlamaForCausalLM"),
        ("LlamaConfig", None, "LlamaForCausalLM", "LlamaForCausalLM"),
        ("LlamaConfig", ["OfARepository", "LlamaTokenizerFast"], "LlamaForCausalLM", "LlamaForCausalLM"),
        ("BartConfig", None, "BartForConditionalGeneration", "BartForConditionalGeneration"),
        ("BartConfig", ["BartForCausalLM"], "BartForCausalLM", "BartForCausalLM"),
        ("T5Config", ["T5EncoderModel"], "T5EncoderModel", "T5ForConditionalGeneration"),
        ("WhisperConfig", None, "WhisperForConditionalGeneration", "WhisperForConditionalGeneration"),
        ("Gemma3Config", None, "Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("Qwen2VLConfig", None, "Qwen2VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
        ("BertConfig", ["BertModel"], "BertModel", "BertLMHeadModel"),
        ("ViTConfig", None, "ViTModel", "ViTModel"),
    ],
)
def test_the_class_of_a_config(config: str, named: list[str] | None, cls: str, generating: str) -> None:
    made = getattr(transformers, config)(architectures=named)
    assert models.model_class(made).__name__ == cls
    assert models.known_class(made) is models.model_class(made)
    assert models.generating_class(made).__name__ == generating


def test_a_config_without_a_class_is_refused() -> None:
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own"

    assert models.known_class(OwnConfig()) is None
    for ask in (models.model_class, models.generating_class):
        with pytest.raises(UnsupportedError, match="model_type own"):
            ask(OwnConfig())


def test_a_model_without_memory_leaves_its_config_alone() -> None:
    config = llama_config(4, 2)
    before = config.to_dict()
    model = models.without_memory(transformers.LlamaForCausalLM, config)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert config.to_dict() == before
    assert model.config is not config
