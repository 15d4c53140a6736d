"""What people get wrong, in Python and on the command line: told in one message, never by a trace through torch."""

from __future__ import annotations

import json
import pickle
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, ViTMSNConfig, ViTMSNModel

import tp_transformers
from tests.support.commands import main
from tp_transformers import CheckpointError, MeshError, PlanError, UnsupportedError
from tp_transformers.checkpoint import verify_sharded

UP = "model.layers.*.mlp.up_proj"


class Here:
    """A checkpoint, and what can be done to copies of it."""

    def __init__(self, folder: str, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch

    def load(self, folder: Any = None, **options: Any) -> Any:
        """Load it, or another."""
        return AutoModelForCausalLM.from_pretrained(folder or self.folder, **{"tp_plan": "auto", **options})

    def without(self, suffix: str) -> Path:
        """A copy without the files of one ending."""
        copy = Path(shutil.copytree(self.folder, self.scratch / f"without{suffix}"))
        for path in copy.glob(f"*{suffix}"):
            path.unlink()
        return copy

    def damaged(self, damage: Callable[[bytes], bytes]) -> Path:
        """A copy of which one weight file is another."""
        copy = Path(shutil.copytree(self.folder, self.scratch / "damaged"))
        path = sorted(copy.glob("*.safetensors"))[0]
        path.write_bytes(damage(path.read_bytes()))
        return copy

    def configured(self, **settings: Any) -> Path:
        """A copy with other settings in its config."""
        copy = Path(shutil.copytree(self.folder, self.scratch / "configured"))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **settings}))
        return copy

    def plan(self, text: str) -> str:
        """A file."""
        path = self.scratch / "plan.yaml"
        path.write_text(text)
        return str(path)

    def vit(self) -> Path:
        """A model that nothing has a plan for."""
        model = ViTMSNModel(
            ViTMSNConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        )
        model.save_pretrained(self.scratch / "vit")
        return self.scratch / "vit"


@pytest.fixture
def here(cases: Any, tmp_path: Path) -> Here:
    """A Llama of 8 query and 4 KV heads."""
    return Here(cases(8, 4).folder, tmp_path)


IN_PYTHON: dict[str, tuple[Callable[[Here], object], type[Exception], str]] = {
    "a device map": (lambda here: here.load(device_map="auto"), PlanError, "got both tp_plan and device_map"),
    "more ranks than there are": (lambda here: here.load(tp_size=2), MeshError, "torchrun --nproc-per-node 2"),
    "a rule for no module": (lambda here: here.load(tp_plan={"up_proj": "colwise"}), PlanError, "matches no module"),
    "an option alone": (lambda here: here.load(tp_plan=None, tp_map=True), PlanError, "got tp_map without tp_plan"),
    "an option misspelt": (lambda here: here.load(tp_sream=True), PlanError, "(nearest: tp_stream"),
    "an option in words": (lambda here: here.load(tp_map="yes"), PlanError, "tp_map: got 'yes'"),
    "a number for an option": (lambda here: here.load(tp_prefetch=2), PlanError, "tp_prefetch: got 2"),
    "gguf_file": (lambda here: here.load(gguf_file="m.gguf"), CheckpointError, "m.gguf of "),
    "a streamed GGUF file": (
        lambda here: here.load(gguf_file="m.gguf", tp_stream=True),
        UnsupportedError,
        "both tp_stream=True and gguf_file",
    ),
    "a dtype that is none": (lambda here: here.load(dtype="bf17"), UnsupportedError, "dtype: got 'bf17'"),
    "no ranks": (lambda here: here.load(tp_size=0), MeshError, "got 0, expected 1"),
    "ranks in words": (lambda here: here.load(tp_size="2"), MeshError, "got '2', expected 1"),
    "a mesh in words": (lambda here: here.load(device_mesh="cuda"), MeshError, "device_mesh: got 'cuda'"),
    "auto misspelt": (lambda here: here.load(tp_plan="Auto"), PlanError, 'pass tp_plan="auto"'),
    "a strategy for a plan": (lambda here: here.load(tp_plan="colwise"), PlanError, "'colwise', no plan of that name"),
    "a plan's name misspelt": (lambda here: here.load(tp_plan="qwen33"), PlanError, "(nearest: qwen3, "),
    "a plan's name for another model": (
        lambda here: here.load(tp_plan="qwen3"),
        PlanError,
        "the model is a llama",
    ),
    "a folder for a plan": (lambda here: here.load(tp_plan=str(here.scratch)), PlanError, "got is a directory"),
    "broken YAML": (lambda here: here.load(tp_plan=here.plan("rules: [")), PlanError, "plan.yaml"),
    "a plan of another model": (
        lambda here: here.load(tp_plan=here.plan("model_type: phi3\nextends: phi3")),
        PlanError,
        "is for phi3, the model is a llama",
    ),
    "a strategy misspelt": (lambda here: here.load(tp_plan={UP: "colwize"}), PlanError, "(nearest: colwise"),
    "a number for a strategy": (lambda here: here.load(tp_plan={UP: 3}), PlanError, "the strategy is 3"),
    "two rules for a module": (
        lambda here: here.load(tp_plan={UP: "colwise", UP.replace("*", "0"): "colwise"}),
        PlanError,
        "two rules match it",
    ),
    "half a pair": (lambda here: here.load(tp_plan={UP: "colwise"}), PlanError, "down_proj rowwise"),
    "a rule with a misspelt key": (
        lambda here: here.load(tp_plan={UP: {"strategy": "colwise", "part": 2}}),
        PlanError,
        "not ['part', 'strategy']",
    ),
    "a folder that is not there": (lambda here: here.load("/no/such/folder"), CheckpointError, "got no such folder"),
    "no weights": (lambda here: here.load(here.without(".safetensors")), CheckpointError, "safetensors"),
    "a truncated file": (lambda here: here.load(here.damaged(lambda old: old[:-1000])), CheckpointError, "truncated"),
    "a file of something else": (
        lambda here: here.load(here.damaged(lambda old: b"\xff" * 100)),
        CheckpointError,
        "not safetensors",
    ),
    "a config of another width": (
        lambda here: here.load(here.configured(intermediate_size=97)),
        CheckpointError,
        "tensors of the wrong shape",
    ),
    "quantised with HQQ": (
        lambda here: here.load(here.configured(quantization_config={"quant_method": "hqq", "bits": 4})),
        UnsupportedError,
        "quantised with hqq",
    ),
    "a model without a plan": (
        lambda here: AutoModel.from_pretrained(here.vit(), tp_plan="auto"),
        PlanError,
        "for which there is no plan",
    ),
    "to shard a plain model": (
        lambda here: tp_transformers.save_sharded(LlamaForCausalLM.from_pretrained(here.folder), here.scratch / "out"),
        UnsupportedError,
        "loaded without tp_plan",
    ),
    "to shard over a file": (
        lambda here: tp_transformers.save_sharded(here.load(), here.plan("")),
        CheckpointError,
        "got a file of that name",
    ),
    "to save over a file": (
        lambda here: here.load().save_pretrained(here.plan("")),
        CheckpointError,
        "got a file of that name",
    ),
    "to verify what is not sharded": (
        lambda here: verify_sharded(here.folder),
        CheckpointError,
        "a save_sharded that was completed",
    ),
    "to pickle": (lambda here: pickle.dumps(here.load()), UnsupportedError, "save_sharded(model, folder)"),
    "to torch.save": (
        lambda here: torch.save(here.load(), here.scratch / "model.pt"),
        UnsupportedError,
        "torch.save(model.state_dict()",
    ),
    "a strategy that is none": (
        lambda here: tp_transformers.strategies.STRATEGIES.register_strategy("mine", 3),
        PlanError,
        "Inherit from tp_transformers.strategies.TensorParallelLayer",
    ),
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_in_python(name, here) -> None:
    act, kind, says = IN_PYTHON[name]
    with tp_transformers.enable(), pytest.raises(kind) as caught:
        act(here)
    assert says in str(caught.value)
    assert "tp_transformers" in traceback.extract_tb(caught.tb)[-1].filename
    assert not torch.distributed.is_initialized()


MODEL = "{folder}"
ON_THE_COMMAND_LINE: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "arguments are required: COMMAND"),
    "a command misspelt": (["plam", MODEL], "invalid choice: 'plam'"),
    "plan without a size": (["plan", MODEL], "number of ranks: got none, expected one number. Give --tp-size"),
    "plan for no ranks": (["plan", MODEL, "--tp-size", "0"], "--tp-size: got 0"),
    "plan for ranks in words": (["plan", MODEL, "--tp-size", "two"], "invalid int value: 'two'"),
    "plan in a strange unit": (["plan", MODEL, "--tp-size", "2", "--gpu-memory", "lots"], "Say it as 24GB"),
    "plan with a plan that is not there": (["plan", MODEL, "--tp-size", "2", "--plan", "no.yaml"], "got no such file"),
    "plan in a dtype that is none": (["plan", MODEL, "--tp-size", "2", "--dtype", "bf17"], "--dtype: got 'bf17'"),
    "plan of an empty batch": (["plan", MODEL, "--tp-size", "2", "--batch", "0"], "--batch: got 0"),
    "plan of no folder": (["plan", "./no/such", "--tp-size", "2"], "got no such folder"),
    "plan of a folder of something else": (["plan", "{scratch}", "--tp-size", "2"], "without config.json"),
    "plan as a picture": (["plan", MODEL, "--tp-size", "2", "--png", "x.png"], "--json has the shape of each weight"),
    "verify on ranks in words": (["verify", MODEL, "--tp-size", "2,x"], "--tp-size: got 2,x"),
    "plan for a memory without its unit": (
        ["plan", MODEL, "--tp-size", "2", "--gpu-memory", "24"],
        "expected a number of bytes with its unit",
    ),
    "verify of no folder": (["verify", "./no/such", "--tp-size", "2"], "got no such folder"),
    "suggest for no folder": (["suggest", "./no/such", "{scratch}/out.yaml"], "got no such folder"),
    "shard of no folder": (["shard", "./no/such", "{scratch}/out", "--tp-size", "2"], "got no such folder"),
    "verify with a plan that is not there": (["verify", MODEL, "--tp-size", "2", "--plan", "no.yaml"], "no such file"),
    "suggest without a file": (["suggest", MODEL], "required: OUT.yaml"),
    "suggest over a file": (["suggest", MODEL, "{file}"], "Pass --force"),
    "suggest into no folder": (["suggest", MODEL, "/no/dir/out.yaml"], "got no such file or directory"),
    "shard for no ranks": (["shard", MODEL, "{scratch}/out", "--tp-size", "0"], "--tp-size: got 0"),
    "shard into the model": (["shard", MODEL, MODEL, "--tp-size", "2"], "one inside this one will do"),
    "shard over a file": (["shard", MODEL, "{file}", "--tp-size", "2"], "got a file of that name"),
    "run without ranks": (["run", "{file}"], "number of ranks: got none, expected one number. Give -n"),
    "run what is not there": (["run", "-n", "2", "no.py"], "script no.py: got no such file"),
    "plans with more": (["plans", "--all"], "unrecognized arguments: --all"),
}


@pytest.mark.parametrize("name", ON_THE_COMMAND_LINE)
def test_on_the_command_line(name, here, capsys) -> None:
    arguments, says = ON_THE_COMMAND_LINE[name]
    names = {"folder": here.folder, "scratch": here.scratch, "file": here.plan(yaml.safe_dump({"a": 1}))}
    try:
        code = main([argument.format(**names) for argument in arguments])
    except SystemExit as ended:  # argparse's own
        code = int(ended.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
