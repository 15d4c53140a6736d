"""Bytes of packed weights that `tp-transformers plan --packed` counts, against those that a load holds."""

from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support import quantized
from tests.support.models import llama_config, load
from tests.support.tiers import wide
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.memory import plan_memory

FORMATS = {
    "int4": partial(quantized.compressed, bits=4, group=32),
    "nvfp4": partial(quantized.small_groups, form="nvfp4-pack-quantized"),
    "gptq": quantized.gptq,
    "awq": quantized.awq,
    "int8": partial(quantized.compressed, bits=8),
}


def held(folder: str) -> tuple[tuple[int, ...], list[str]]:
    """Run on every rank: bytes of all ranks, and the names of the operators."""
    report = load(folder, dtype=torch.bfloat16, tp_dequantize=False).tp_report
    return report.shares, sorted(report.products)


@pytest.mark.parametrize("size", wide([3, 2, 1], 1))
@pytest.mark.parametrize("name", wide(FORMATS, 3))
def test_packed_weights_count_as_a_load_holds_them(pool, tmp_path, name, size) -> None:
    torch.manual_seed(0)
    config = llama_config(9, 3, hidden_size=288, head_dim=32, intermediate_size=352, dtype="bfloat16")
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    FORMATS[name](tmp_path / "plain", tmp_path / "packed")
    planned = plan_memory(survey(str(tmp_path / "packed"), packed=True), size).parameter_bytes
    ((shares, products), *_) = pool.run(size, held, str(tmp_path / "packed"))
    print(name, planned, products)
    assert planned == shares
