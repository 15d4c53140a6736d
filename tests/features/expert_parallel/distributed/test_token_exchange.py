"""Experts that are sent the tokens of other ranks, held against one process, which computes all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import tp_transformers
from benchmarks.forward import Collectives
from tests.features.batch_sharded.distributed import test_batch_sharded as batches
from tests.features.sequence.distributed import test_sequence_parallel as sequences
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, observe
from tests.support.comparisons import assert_same_tensors, gradient_differences, relative
from tests.support.models import PROMPTS, Case, load, save_as_loaded
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import local_tensor

SECTIONS = dict.fromkeys(("mixtral", "gpt_oss"), "base_model") | dict.fromkeys(
    ("qwen3_moe", "qwen2_moe", "deepseek_v3"), "optional"
)
EXPERTS = 6


def write_plan(folder: Path, name: str) -> str:
    """A plan in which experts are whole on one rank each, and are sent their tokens."""
    params = ["gate_up_proj", "down_proj", *(["gate_up_proj_bias", "down_proj_bias"] if name == "gpt_oss" else [])]
    rules = {f"layers.*.mlp.experts.{param}": "local" for param in params}
    lines = [f"  {key}: {value}" for key, value in {"layers.*.mlp.experts": "moe_all_to_all", **rules}.items()]
    plan = folder / "exchange.yaml"
    plan.write_text("\n".join([f"model_type: {name}", f"extends: {name}", f"{SECTIONS[name]}:", *lines, ""]))
    return str(plan)


def make_case(folder: Path, name: str, *, crowded: bool = False) -> Case:
    """A checkpoint with 6 experts, and its reference; `crowded`: every token goes to the first two experts."""
    architecture = ARCHITECTURES[name]
    settings = architecture.settings(8, 4, False) | dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS)
    if name == "deepseek_v3":
        settings |= {"n_routed_experts": EXPERTS, "num_key_value_heads": 8}
        settings.pop("num_experts")
    torch.manual_seed(0)
    model = getattr(transformers, architecture.model)(getattr(transformers, architecture.config)(**settings)).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.add_(torch.randn_like(param) * 0.2 if param.ndim == 1 or "norm" in key else 0)
            if param.ndim > 1 and param.std() < 0.1:
                param.normal_(std=0.2)
        for module in model.modules():
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS)[torch.randperm(EXPERTS)])
            if crowded and type(module).__name__ == "GptOssTopKRouter":
                module.bias[:2] += 100
    model = save_as_loaded(model, folder)
    torch.save(observe(model), folder / "reference.pt")
    return Case(str(folder / "checkpoint"), str(folder / "reference.pt"))


@pytest.fixture
def crowded() -> bool:
    return False


@pytest.fixture
def case(tmp_path: Path, name: str, crowded: bool) -> Case:
    """A mixture of experts; `crowded`, where every token goes to the first two experts."""
    return make_case(tmp_path, name, crowded=crowded)


@pytest.fixture
def plan(tmp_path: Path, name: str) -> str:
    """A plan in which experts exchange tokens."""
    return write_plan(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "size", "crowded"),
    wide(
        [
            ("gpt_oss", 3, True),
            ("qwen2_moe", 2, False),
            ("deepseek_v3", 4, False),
            *((name, size, False) for name in ("mixtral", "qwen3_moe", "gpt_oss") for size in (2, 3, 4)),
            ("deepseek_v3", 2, False),
            ("deepseek_v3", 3, False),
            ("gpt_oss", 4, True),
        ],
        2,
    ),
)
@on_ranks()
def test_parts_of_a_sequence_are_computed_as_in_one_process(case, plan, tmp_path, size) -> None:
    sequences.check_sequences(case.folder, case.reference, tp_plan=plan)
    model = load(case.folder, tp_plan=plan, tp_sequence_parallel=True)
    model.save_pretrained(tmp_path / "saved")
    torch.distributed.barrier()
    assert_same_tensors(case.folder, tmp_path / "saved")
    experts = next(param for key, param in model.named_parameters() if key.endswith("experts.down_proj"))
    held = {2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 1, 1]}[size]
    assert len(local_tensor(experts)) == held[torch.distributed.get_rank()]


@pytest.mark.parametrize(
    ("name", "size", "copies", "chosen", "mode"),
    wide(
        [
            ("deepseek_v3", 3, 1, ["model.layers.*.mlp"], "shard"),
            ("mixtral", 4, 2, True, "shard"),
            ("mixtral", 4, 1, ["model.layers.*.mlp.experts"], "replicate"),
            ("qwen2_moe", 2, 1, ["model.layers.*.mlp"], "replicate"),
            ("qwen3_moe", 3, 1, True, "replicate"),
            ("gpt_oss", 4, 1, ["model.layers.*"], "replicate"),
            ("deepseek_v3", 2, 1, True, "replicate"),
        ],
        1,
    ),
)
@on_ranks()
def test_ranks_with_batches_of_their_own_train_as_one_process(case, plan, tmp_path, copies, chosen, mode) -> None:
    saved = str(tmp_path / "saved")
    batches.check_trained(case.folder, copies, chosen, mode, saved, chaos=50, tp_plan=plan)  # of routers that cancel


@pytest.mark.parametrize("name", ["mixtral"])
@pytest.mark.parametrize("way", wide(["grouped_mm", "eager", "batched_mm"], 1))
@on_ranks(3)
def test_every_implementation_of_experts(case, plan, way) -> None:
    """One step by an implementation of experts, against one process's by the same."""
    model = load(case.folder, tp_plan=plan, tp_sequence_parallel=True, experts_implementation=way)
    plain = AutoModelForCausalLM.from_pretrained(case.folder, experts_implementation=way)
    with Collectives() as seen:
        loss = model(PROMPTS, labels=PROMPTS).loss
    loss.backward()
    expected = plain(PROMPTS, labels=PROMPTS).loss
    expected.backward()
    errors = [relative(loss.detach(), expected.detach()), *gradient_differences(model, plain).values()]
    assert max(errors) < GRADIENT_TOLERANCE
    # Of each of two layers: numbers, tokens, sums; all that is gathered else is attention's, and around the layers.
    assert seen.counts["alltoall_base"] == 2 * 3, seen.counts


@pytest.mark.parametrize(("name", "crowded"), [("gpt_oss", True)])
@on_ranks(3)
def test_experts_without_tokens(case, plan) -> None:
    """Ranks have samples of their own, all of whose tokens go to the first rank's experts."""
    model, _ = batches.load_on_mesh(case.folder, 1, ["model.layers.*.mlp"], tp_plan=plan)
    plain = AutoModelForCausalLM.from_pretrained(case.folder)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    texts = [PROMPTS, PROMPTS.flip(0)[:1], PROMPTS.flip(1)]
    logits = model(texts[rank]).logits
    (logits.square().sum() * size).backward()  # the gradient is that of the mean over the ranks
    expected = [plain(text).logits for text in texts[:size]]
    torch.cat(expected).square().sum().backward()
    found = {"logits": relative(logits.detach(), expected[rank].detach())}
    for name, param in model.named_parameters():
        if ".experts." in name:
            found[name] = relative(tp_transformers.full_tensor(param, param.grad), plain.get_parameter(name).grad)
            assert rank == 0 or not local_tensor(param.grad).any()
    assert len(found) == 1 + 4 * 2
    assert max(found.values()) < GRADIENT_TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral"])
@on_ranks()
def test_a_compiled_step_has_a_break_at_the_experts_alone(case, plan) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load(case.folder, tp_plan=plan, tp_sequence_parallel=True, experts_implementation="grouped_mm")
    plain = AutoModelForCausalLM.from_pretrained(case.folder)
    losses = [each(PROMPTS, labels=PROMPTS).loss for each in (torch.compile(model, backend="eager"), plain)]
    for loss in losses:
        loss.backward()
    errors = [relative(*(loss.detach() for loss in losses)), *gradient_differences(model, plain).values()]
    assert max(errors) < GRADIENT_TOLERANCE
    breaks = [*torch._dynamo.utils.counters["graph_break"]]
    assert breaks
    assert all("MixtralExperts.forward" in reason for reason in breaks), breaks
