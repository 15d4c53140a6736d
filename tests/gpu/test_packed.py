"""Packed weights on GPUs, multiplied by the operators there, against the same weights dequantised."""

from typing import Any

import pytest
import torch

from benchmarks.bench_quantised import config_of
from benchmarks.checkpoints import write
from tests.support.comparisons import relative
from tests.support.devices import DEVICE, load_here
from tests.support.tiers import wide

FORMATS = ["nf4", "gptq", "int8", "fp8", "mxfp4", "int4", "awq"]
"""nf4 by the operators of bitsandbytes where it is installed."""


def compare(folder: str) -> dict[str, Any]:
    """Run on every rank: errors of logits relative to fp32, packed and dequantised; operators; bytes held."""
    ids = torch.randint(3, 2000, (1, 80), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found: dict[str, Any] = {}
    with torch.no_grad():
        exact = load_here(folder, dtype=torch.float32)
        references = {length: exact(ids[:, :length]).logits for length in (5, 80)}
        for side, dequantised in (("packed", False), ("dequantised", True)):
            model = load_here(folder, dtype=torch.bfloat16, tp_dequantize=dequantised)
            errors = [relative(model(ids[:, :n]).logits.float(), logits) for n, logits in references.items()]
            found[side] = max(errors)
            found[f"{side} bytes"], found[f"{side} products"] = model.tp_report.share, model.tp_report.products
    return found


@pytest.mark.parametrize("form", wide(FORMATS, 1))
@pytest.mark.parametrize("size", wide([2, 3], 1))
def test_products_are_as_exact_as_dequantised(pool, tmp_path, form, size) -> None:
    write(tmp_path / "checkpoint", config_of(form, "9/3", layers=1), form)
    for found in pool.run(size, compare, str(tmp_path / "checkpoint")):
        print(found)
        is_quantised = "activations quantised" in str(found["packed products"])
        assert found["packed"] < 2 * found["dequantised"] + (2**-4 if is_quantised else 2**-8)  # of 4 and 8 bits
        assert found["packed bytes"] < found["dequantised bytes"]
