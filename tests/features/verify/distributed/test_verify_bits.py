"""`verify --bits`: plans with `invariant` have the bits of one process; plans that sum over the ranks do not."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.distributed.tensor import Replicate
from transformers import LlamaConfig

from tp_transformers.features.invariant.linear import InvariantColwiseParallel
from tp_transformers.features.verify.command import summary
from tp_transformers.features.verify.verify import with_torchrun
from tp_transformers.strategies import RowwiseParallel, TensorParallelLayer
from tp_transformers.verify import verify

pytestmark = pytest.mark.usefixtures("in_pool")

SIZES: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 9, "num_key_value_heads": 3}
LLAMA = LlamaConfig(**SIZES)
LATENT = {"hidden_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 12, "q_lora_rank": 512}
EXPERTS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
GEMMA: dict[str, Any] = {"hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": SIZES,
    "Qwen3Config": {**SIZES, "hidden_size": 768, "head_dim": 64},
    "MixtralConfig": {**SIZES, "num_local_experts": 8},
    "Phi3Config": {**SIZES, "pad_token_id": 0},
    "Olmo2Config": SIZES,
    "GPT2Config": {},
    "Gemma3TextConfig": GEMMA,
    "DeepseekV3Config": {**LATENT, **EXPERTS},
}


class Sums(RowwiseParallel):
    """Adds up partial sums of the ranks, as `rowwise` does."""


class WithoutFlag(InvariantColwiseParallel):
    """Multiplies by a local weight that requires no gradient where no gradient is recorded."""

    prepare_arguments = TensorParallelLayer.prepare_arguments

    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate())


def test_an_invariant_plan_has_the_bits_of_one_process() -> None:
    (verdict,) = verify(LLAMA, grads=True, bits=True)
    assert verdict.ok, verdict.faults
    assert (verdict.logits, verdict.loss, verdict.tokens) == (0, 0, True)
    assert verdict.gradient[1] == 0
    assert verdict.bits == ("float32", "bfloat16")
    expected = "2 ranks: the bits of one process in float32 and bfloat16 (logits, loss, tokens, gradients)"
    assert summary(verdict) == expected


def test_bits_that_generate_alone_asks_for(registered) -> None:
    registered("invariant_colwise_rep", WithoutFlag)
    (verdict,) = verify(LLAMA, bits=True)
    assert verdict.logits == 0
    assert verdict.faults[0].startswith("the logits of the last of 2 x 7 tokens, ")
    assert "tokens after 2 x 7 tokens" in verdict.faults[0]


def test_a_strategy_that_sums_over_the_ranks_is_named(registered) -> None:
    registered("invariant_rowwise", Sums)
    (verdict,) = verify(LLAMA, bits=True)
    # A kernel that adds up 384 features at a time has the bits of rank 0's 6 heads and rank 1's 3 in o_proj.
    named = r"model\.layers\.0\.(self_attn\.o_proj|mlp\.down_proj): its output is the first that differs"
    assert re.match(named, verdict.faults[0]), verdict.faults
    assert "_proj: invariant_rowwise. Its strategy sums over the ranks" in verdict.faults[0]
    assert verdict.bits == ("float32",)
    assert 0 < verdict.logits < 1e-4

    registered("sums", Sums)
    projections = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "sums"}
    plan = {f"model.layers.*.mlp.{name}": strategy for name, strategy in projections.items()}
    (verdict,) = verify(LLAMA, bits=True, plan=plan, allow_replicated=True)
    assert "model.layers.*.mlp.down_proj: sums has no invariant form" in verdict.faults[0]


@pytest.mark.slow
def test_ranks_with_the_usual_plan_have_other_bits() -> None:
    def as_usual(folder: Path, *arguments: Any) -> int:
        """Start ranks that load with the plan as it was before `bits`."""
        request = folder / "request.pickle"
        with request.open("rb") as file:
            path, (cls, plan, *settings) = pickle.load(file), pickle.load(file)
        with request.open("wb") as file:
            pickle.dump(path, file)
            pickle.dump((cls, plan.with_options(invariant=False), *settings), file)
        return with_torchrun(folder, *arguments)

    (verdict,) = verify(LLAMA, grads=True, bits=True, launch=as_usual)
    assert 0 < verdict.logits < 1e-4
    assert 0 < verdict.gradient[1] < 1e-3
    assert "the logits differ" in verdict.faults[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_architectures_have_the_bits_of_one_process(name) -> None:
    config = getattr(transformers, name)(**CONFIGS[name])
    for verdict in verify(config, sizes=(2, 3, 4), grads=True, bits=True):
        assert verdict.ok, verdict.faults
        assert verdict.bits == ("float32", "bfloat16")
        assert verdict.loss == 0
        assert verdict.gradient is not None
