"""`verify`: a plan that is right, and wrong ones, whose modules and rules it has to name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)

from tests.features.verify.distributed.conftest import SIZES, changed
from tests.support.commands import main
from tests.support.comparisons import different_tensors
from tp_transformers import UnsupportedError
from tp_transformers.features.loss_parallel.cross_entropy import LossParallel
from tp_transformers.features.verify import verify
from tp_transformers.features.verify.small_models.config import meta_model
from tp_transformers.plans import Plan
from tp_transformers.strategies import STRATEGIES
from tp_transformers.verify import Verdict

DEEP = SIZES | {"num_hidden_layers": 12}
CONFIGS = {cls.model_type: cls(**DEEP) for cls in (LlamaConfig, Phi3Config, Qwen3Config, Olmo2Config)}


class HalvedLoss(LossParallel):
    """Computes half of the loss."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, mesh: Any) -> Any:
        if outputs.loss is not None:
            outputs["loss"] = outputs.loss / 2
        return LossParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, mesh)


@pytest.mark.parametrize("ranks", ["in_pool", pytest.param("tmp_path", marks=pytest.mark.slow, id="by torchrun")])
def test_a_right_plan_is_proven(request, tmp_path, capsys, ranks) -> None:
    request.getfixturevalue(ranks)
    CONFIGS["qwen3"].save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path / "config.json"), "--tp-size", "2", "--grads", "--json"]) == 0
    printed = capsys.readouterr()
    assert "verify: 2 ranks are to compute the same" in printed.err
    told = json.loads(printed.out)
    assert max(told.pop("logits"), told.pop("loss")) < 1e-5
    assert told.pop("gradient")[1] < 1e-4
    assert told == {"size": 2, "ok": True, "faults": [], "tokens": True, "notes": [], "bits": []}


@pytest.mark.slow
def test_the_class_that_the_config_names_is_proven(monkeypatch) -> None:
    proven = []
    monkeypatch.setattr(verify, "meta_model", lambda cls, config: proven.append(cls) or meta_model(cls, config))
    (verdict,) = verify.verify(LlamaConfig(**DEEP, architectures=["LlamaModel"]))
    assert verdict.ok
    assert verdict.logits is not None, "the states of a model without a head"
    assert set(proven) == {LlamaModel}


# One process is enough for these: they are told before there are ranks.
@pytest.mark.parametrize(
    ("model_type", "rules", "says"),
    [
        ("llama", {"layers.*.mlp.up_proj": "rowwise"}, "make model.layers.*.mlp.up_proj colwise"),
        ("llama", {"layers.*.self_attn.o_proj": None}, "model.layers.*.self_attn: k_proj, q_proj, v_proj leave"),
        ("phi3", {"layers.*.mlp.gate_up_proj": "colwise"}, "model.layers.*.mlp.gate_up_proj: it leaves its features"),
        ("qwen3", {"layers.*.self_attn.q_norm": None}, "add model.layers.*.self_attn.q_norm: replicated_with"),
        ("olmo2", {"layers.*.self_attn.q_norm": None}, "it computes on sharded heads"),
    ],
)
def test_what_does_not_fit_is_told_without_ranks(tmp_path, monkeypatch, printed, model_type, rules, says) -> None:
    monkeypatch.delattr(verify, "torchrun")
    CONFIGS[model_type].save_pretrained(tmp_path)
    plan = changed(tmp_path, model_type, rules)
    told = printed("verify", str(tmp_path), "--plan", str(plan), code=1)
    assert told.startswith("2 ranks: not as one process\n  - plan ")
    assert says in told


UNSUMMED = {"layers.*.mlp.down_proj": "no_sum"}
PARTS = {"strategy": "packed_colwise", "parts": ["key", "value", "query"]}


@pytest.mark.parametrize(
    ("model_type", "rules", "first", "says"),
    [
        ("phi3", {"layers.*.self_attn.qkv_proj": PARTS}, "self_attn.o_proj: its input", "qkv_proj: packed_colwise of"),
        ("llama", UNSUMMED, "mlp.down_proj: its output", "a partial sum that nothing adds up"),
        ("llama", {"layers.*.mlp": "summed"}, "mlp: its output", "It is 2 times too large"),
    ],
)
@pytest.mark.usefixtures("in_pool", "own_strategies")
def test_the_first_module_that_differs_is_named_with_its_rule(tmp_path, model_type, rules, first, says) -> None:
    plan = changed(tmp_path, model_type, rules)
    (verdict,) = verify.verify(CONFIGS[model_type], plan=plan)
    assert not verdict.ok
    assert verdict.faults[0].startswith(f"model.layers.0.{first} is the first that differs"), verdict.faults
    assert says in verdict.faults[0]
    assert verdict.faults[1].startswith("the logits differ")


@pytest.mark.usefixtures("in_pool", "own_strategies")
def test_the_first_parameter_whose_gradient_differs_is_named_with_its_rule(tmp_path) -> None:
    plan = changed(tmp_path, "llama", {"layers.*.mlp.up_proj": "deaf"})
    (verdict,) = verify.verify(CONFIGS["llama"], plan=plan, grads=True)
    assert verdict.logits < 1e-5
    (fault,) = verdict.faults
    assert fault.startswith("model.layers.1.post_attention_layernorm.weight: its gradient is the first that differs")
    assert "up_proj (its rule: model.layers.*.mlp.up_proj: deaf)" in fault


@pytest.mark.usefixtures("in_pool", "own_strategies")
def test_the_options_of_a_plan_are_proven_and_blamed_as_they_are_rewritten(tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.yaml"
    monkeypatch.setitem(STRATEGIES, "halved_loss", HalvedLoss)
    plan = Plan.parse({"extends": "llama"}, source="mine").with_options(sequence_parallel=True, loss_parallel=True)
    (verdict,) = verify.verify(CONFIGS["llama"], plan=plan, grads=True)
    assert verdict.ok, verdict.faults
    assert verdict.loss < 1e-5
    path.write_text("extends: llama\nrules: {'': halved_loss}\nheads: {lm_head: colwise_loss}\n")
    (verdict,) = verify.verify(CONFIGS["llama"], plan=path)
    assert [fault.partition(" (")[0] for fault in verdict.faults] == ["the loss differs"]

    rules = {"layers.*.self_attn.qkv_proj": PARTS}
    plan = Plan.parse({"extends": "phi3", "base_model": rules}, source="mine").with_options(sequence_parallel=True)
    (verdict,) = verify.verify(CONFIGS["phi3"], plan=plan)
    assert verdict.faults[0].startswith("model.layers.0.self_attn.o_proj: its input is the first that differs")
    assert "its rule: model.layers.*.self_attn.o_proj: local_rowwise" in verdict.faults[0]
    assert "qkv_proj: local_packed_colwise of parts" in verdict.faults[0]


@pytest.mark.usefixtures("own_strategies")
@pytest.mark.slow
def test_a_rank_that_raises_ends_all_with_one_message(tmp_path) -> None:
    plan = changed(tmp_path, "llama", {"layers.*.mlp.gate_proj": "one_raises"})
    (verdict,) = verify.verify(CONFIGS["llama"], plan=plan, timeout=120)
    (fault,) = verdict.faults
    assert fault == (
        "rank 1, answering: ValueError: not today "
        "(in model.layers.0.mlp.gate_proj; its rule: model.layers.*.mlp.gate_proj: one_raises)"
    )


def test_ranks_that_are_lost_are_a_fault(monkeypatch) -> None:
    def run(program: Any, *, ranks: int, timeout: float, output: Any) -> int:
        output.write(b"Signal 9 (SIGKILL) received\n")
        return 1

    monkeypatch.setattr(verify, "torchrun", run)
    state = torch.random.get_rng_state()
    (verdict,) = verify.verify(CONFIGS["llama"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert verdict == Verdict(2, verdict.faults)
    assert "Signal 9" in verdict.faults[0]


@pytest.mark.usefixtures("in_pool")
def test_what_all_ranks_have_reported_counts_however_they_end(monkeypatch) -> None:
    run = verify.torchrun
    monkeypatch.setattr(verify, "torchrun", lambda *args, **keywords: run(*args, **keywords) or 134)
    (verdict,) = verify.verify(CONFIGS["llama"])
    assert verdict.ok


def test_a_checkpoint_that_does_not_reload_is_no_fault_of_the_plan(monkeypatch) -> None:
    def save(model: LlamaForCausalLM, folder: Path) -> None:
        kept = {name: value for name, value in model.state_dict().items() if "q_proj" not in name}
        PreTrainedModel.save_pretrained(model, folder, state_dict=kept)

    monkeypatch.delattr(verify, "torchrun")
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
    lost = r"it has no model\.layers\.0\.self_attn\.q_proj\.weight, model\.layers\.1\.self_attn\.q_proj\.weight,"
    expected = rf"its checkpoint does not reload in one process: other logits \(relative error .*\), and {lost}"
    with pytest.raises(UnsupportedError, match=expected):
        verify.verify(CONFIGS["llama"])


def test_a_message_of_transformers_is_told_in_one_sentence(tmp_path, printed) -> None:
    """Its config class refuses a field with a message of several lines, or raises a TypeError about it."""
    for settings in ({"num_attention_heads": "many"}, {"hidden_size": 510}, {"hidden_act": "none"}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **DEEP, **settings}))
        (line,) = printed("verify", str(tmp_path), code=2).strip().splitlines()
        assert "Traceback" not in line


def test_weights_follow_a_seed(tmp_path, monkeypatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def run(program: Any, **_: Any) -> int:
        (file,) = Path(program[2]).rglob("*.safetensors")
        seen.append(load_file(file))
        return 1

    monkeypatch.setattr(verify, "torchrun", run)
    CONFIGS["llama"].save_pretrained(tmp_path)
    for seed in (0, 0, 1):
        assert main(["verify", str(tmp_path), "--seed", str(seed)]) == 1
    assert different_tensors(seen[0], seen[1]) == []
    assert "model.layers.0.mlp.up_proj.weight" in different_tensors(seen[0], seen[2])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no/such/folder"], "no/such/folder: got"),
        ([".", "--tp-size", "two"], "--tp-size: got two"),
        ([".", "--tp-size", "2,0"], "sizes: got [2, 0]"),
        (["{folder}", "--plan", "no.yaml"], "no.yaml: got no such file"),
    ],
)
def test_a_wrong_request_is_told_on_stderr(tmp_path, printed, arguments, says) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    assert says in printed("verify", *(argument.format(folder=tmp_path) for argument in arguments), code=2)
