"""SmolLM2-135M-Instruct in int4, as the libraries of the formats pack it: text, bytes and saves on ranks."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from tests.distributed.test_smollm2 import PROMPTS, TOLERANCE
from tests.support.comparisons import assert_same_tensors, largest_step, relative
from tests.support.models import bytes_read, headers, load

pytestmark = pytest.mark.slow

README = Path(__file__).parents[4] / "README.md"
GROUP = 64
"""Columns that share a scale: 9 groups of hidden states, 24 of the features between."""


def compressed_tensors(folder: Path, target: Path) -> Any:
    """`pack-quantized` int4 with zero points, calibrated to the weights alone; returns what transformers loads."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="initialized"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            low, high = torch.aminmax(module.weight.detach().unflatten(1, (-1, GROUP)), dim=-1)
            scale, zero = calculate_qparams(low, high, weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
    compressor.update_config(str(target))
    undone = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, quantization_config=undone)


def gptq(folder: Path, target: Path, **settings: Any) -> Any:
    """GPTQ in 4 bits, calibrated to the README; returns a model of the weights that the library makes of it."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # of two cores it makes one worker, and needs two
    gptqmodel = pytest.importorskip("gptqmodel")
    tokens = AutoTokenizer.from_pretrained(folder)(README.read_text())["input_ids"]
    samples = [{"input_ids": tokens[at : at + 256], "attention_mask": [1] * 256} for at in range(0, 2048, 256)]
    config = gptqmodel.QuantizeConfig(bits=4, group_size=GROUP, device="cpu", **settings)
    quantised = gptqmodel.GPTQModel.load(str(folder), config, dtype=torch.float32)
    quantised.quantize(samples, batch_size=1)
    quantised.save(str(target))
    in_torch = {"backend": gptqmodel.BACKEND.GPTQ_TORCH, "device": "cpu", "dtype": torch.float16}
    quantised = gptqmodel.GPTQModel.load(str(target), **in_torch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in quantised.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            model.get_submodule(name).weight.data.copy_(module.dequantize_weight().t())
    return model


def run(model: Any, tokens: str) -> dict[str, torch.Tensor]:
    batch = AutoTokenizer.from_pretrained(tokens)(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        logits = model(**batch).logits[batch["attention_mask"].bool()]
    return {"logits": logits, "tokens": model.generate(**batch, max_new_tokens=12, do_sample=False)}


def compare_and_save(folder: str, tokens: str, reference: str, saved: str) -> list[dict[str, Any]]:
    expected, found = torch.load(reference), []
    for stays_packed in (False, True):
        model = load(folder, dtype=torch.float32, tp_dequantize=not stays_packed)
        seen = run(model, tokens)
        found.append(
            {
                "packed": stays_packed,
                "logits": relative(seen["logits"], expected["logits"]),
                "tokens": torch.equal(seen["tokens"], expected["tokens"]),
                "read": bytes_read(model) - headers(folder),
            }
        )
    model = load(folder, tp_dequantize=False)
    found[-1]["held"] = model.tp_report.share
    model.save_pretrained(saved)
    return found


KINDS = {
    "compressed-tensors": compressed_tensors,
    "gptq": partial(gptq, desc_act=False, sym=True),
    "gptq in order": partial(gptq, desc_act=True, sym=False),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def case(request: Any, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised checkpoint, and what one process says with the weights that it stands for."""
    folder = tmp_path_factory.mktemp("quantised")
    model = request.param(smollm2, folder / "checkpoint")
    torch.save(run(model, str(smollm2)), folder / "reference.pt")
    return folder / "checkpoint", folder / "reference.pt"


@pytest.mark.parametrize("size", [2, 3])
def test_text_is_that_of_one_process(pool, case, smollm2, tmp_path, size) -> None:
    folder, reference = case
    arguments = (str(folder), str(smollm2), str(reference), str(tmp_path / "saved"))
    for rank, results in enumerate(pool.run(size, compare_and_save, *arguments)):
        for result in results:
            print(f"{size} ranks, rank {rank}: {result}")
            assert result["logits"] < TOLERANCE
            assert result["tokens"]
            if result["packed"]:
                assert result["held"] <= 1.1 * result["read"]  # the operators' own scales
                assert result["read"] <= 1.01 * result["held"]  # shapes; groups of all columns
    assert_same_tensors(folder, tmp_path / "saved")


STEPS, LENGTH = 30, 96


def losses_of_adapters(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Losses of steps of AdamW on a LoRA adapter of all linears."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    optimizer = torch.optim.AdamW([param for param in adapted.parameters() if param.requires_grad], lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = tokens[:, step * LENGTH : (step + 1) * LENGTH]
        loss = adapted(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def losses_on_ranks(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    """Run on every rank: the same over packed weights."""
    return losses_of_adapters(load(folder, dtype=torch.float32, tp_dequantize=False), tokens)


def test_adapters_train_over_packed_weights_as_in_one_process(pool, smollm2, tmp_path) -> None:
    model = compressed_tensors(smollm2, tmp_path / "checkpoint")
    text = AutoTokenizer.from_pretrained(smollm2)(README.read_text(), return_tensors="pt")["input_ids"]
    tokens = text[:, : STEPS // 2 * LENGTH].repeat(1, 2)
    expected = losses_of_adapters(model, tokens)
    assert expected[STEPS // 2 :].mean() < expected[: STEPS // 2].mean(), "it learns the text that it sees twice"
    for size in (2, 3):
        for losses in pool.run(size, losses_on_ranks, str(tmp_path / "checkpoint"), tokens, timeout=600):
            difference = largest_step(losses, expected)
            print(f"{size} ranks: losses {losses[0]:.5f} to {losses[-1]:.5f}, largest difference {difference:.1e}")
            assert difference < TOLERANCE
