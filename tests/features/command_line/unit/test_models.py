"""Commands on a model: the class of its config, no memory, code of its own, which runs where a flag says so alone."""

import io
import sys
from pathlib import Path

import pytest
import transformers

from tests.support.commands import main
from tests.support.models import llama_config
from tests.support.needs import needs
from tests.support.remote_code import with_code
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
def test_the_class_of_a_config(config, named, cls, generating) -> None:
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


COMMANDS = {
    "plan": ["--tp-size", "2", "--plan", "infer"],
    "verify": ["--plan", "infer", "--tp-size", "1"],
    "suggest": ["{out}.yaml", "--no-verify"],
    "shard": ["{out}", "--tp-size", "2", "--plan", "infer"],
}


@needs("infer", "planner", "presharded", "verify")
@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_a_repository_runs_only_if_it_is_asked_for(name, tmp_path, capsys, monkeypatch) -> None:
    folder, ran = with_code(tmp_path / "model", "fused"), tmp_path / "ran"
    code = Path(folder, "modeling_fused.py")
    code.write_text(f"open({str(ran)!r}, 'w').close()\n{code.read_text()}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))  # nobody is asked
    monkeypatch.chdir(tmp_path)
    arguments = [name, folder, *(each.format(out=tmp_path / "out") for each in COMMANDS[name])]
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not ran.exists()
    assert said.out == ""
    assert said.err.startswith(f"tp-transformers {name}: {folder}: got a model of its repository's own code")
    assert "--trust-remote-code" in said.err
    assert len(said.err.splitlines()) == 1
    if name == "verify":  # starts ranks; `suggest` has proven it the same way
        return
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert ran.exists()
    assert "not run" not in capsys.readouterr().err
