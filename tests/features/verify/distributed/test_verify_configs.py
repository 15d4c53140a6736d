"""`verify` of quantised configs in floating point, of gated delta nets, and of heads that code counts in its way."""

from pathlib import Path

import pytest
import yaml
from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3NextConfig

from tests.features.verify.distributed.conftest import SIZES
from tests.support.commands import main
from tests.support.remote_code import with_code
from tests.support.tiers import wide
from tp_transformers import UnsupportedError
from tp_transformers.verify import verify

COMPRESSED = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}


@pytest.mark.parametrize(
    ("settings", "title"),
    wide(
        [
            ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
            ({"quant_method": "awq", "bits": 4}, "AWQ"),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
            ({"quant_method": "mxfp4"}, "MXFP4"),
            ({"quant_method": "compressed-tensors", "format": "pack-quantized", **COMPRESSED}, "compressed-tensors"),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ],
        1,
    ),
)
@pytest.mark.usefixtures("in_pool")
def test_a_quantised_config_is_proven_in_floating_point(settings, title) -> None:
    experts = {"num_local_experts": 4} if title == "MXFP4" else {}
    config = (GptOssConfig if experts else Qwen3Config)(**SIZES, **experts, quantization_config=settings)
    (verdict,) = verify(config)
    assert verdict.ok, verdict.faults
    assert verdict.logits is not None
    assert verdict.tokens
    assert any(f"without its {title}" in note for note in verdict.notes)
    assert config.quantization_config == settings


def test_a_config_that_a_load_refuses_is_refused() -> None:
    config = LlamaConfig(**SIZES, quantization_config={"quant_method": "awq", "bits": 4, "version": "gemv"})
    with pytest.raises(UnsupportedError, match="AWQ in 4 bits, in the version gemv"):
        verify(config)


GATED = Qwen3NextConfig(
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=4,
)
GATED_RULES = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    **{f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
}
HEADS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


@pytest.mark.parametrize(
    ("rules", "fault"),
    wide(
        [
            ({}, None),
            ({"layers.*.mlp.shared_expert": "summed"}, "mlp.shared_expert: its output is the first that differs"),
            ({"layers.*.self_attn.v_proj": "swapped"}, "self_attn"),
        ],
        1,
    ),
)
@pytest.mark.usefixtures("in_pool", "own_strategies")
def test_rounding_is_far_from_any_fault_in_gated_delta_nets(tmp_path, rules, fault) -> None:
    """In float32 rounding alone makes errors of up to 1e-3, since the recurrence multiplies it."""
    plan = {"base_model": {**GATED_RULES, **rules}, "attention": {"layers.*.self_attn": HEADS}}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"model_type": "qwen3_next", **plan}))
    (verdict,) = verify(GATED, plan=path, grads=fault is None)
    assert verdict.ok is (fault is None), verdict.faults
    if fault is None:
        assert verdict.logits < 1e-9
        assert verdict.gradient[1] < 1e-8
    else:
        assert fault in verdict.faults[0], verdict.faults


@pytest.mark.slow
def test_attention_that_counts_heads_by_a_name_of_its_own_is_told_so(tmp_path, capsys) -> None:
    folder = with_code(tmp_path / "model", "fused")
    code = Path(folder) / "modeling_fused.py"
    text = code.read_text().replace("x.shape[:-1], -1, self.head_dim", "x.shape[:-1], self.nh, self.head_dim")
    code.write_text(text.replace("self.head_dim =", "self.nh = config.num_attention_heads\n        self.head_dim ="))
    plan, said = tmp_path / "plan.yaml", "the plan's attention shards its heads) Its forward finds a rank's heads in"
    for more, is_told in (("", True), (", gathered: true", False)):  # the remedy that the message names
        plan.write_text(f"attention: {{blocks.*.attend: {{fused: qkv, output: back{more}}}}}\n")
        options = ["--plan", str(plan), "--tp-size", "2", "--trust-remote-code", "--allow-replicated"]
        assert main(["verify", folder, *options]) == is_told
        assert (said in capsys.readouterr().out) is is_told
