"""Models that see or hear, with inputs of their families' own processors: on ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.support.architectures import LOGITS_TOLERANCE
from tests.support.comparisons import relative
from tests.support.models import load, save_as_loaded
from tests.support.needs import needs
from tests.support.processors import FAMILIES

pytestmark = [
    pytest.mark.distributed,
    needs("refusals"),
    pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="older processors are others"),
]
QUICK = {"qwen3_vl", "whisper"}


def compare_with_processed(folder: str, kind: Any, inputs: dict[str, Tensor]) -> None:
    """Run on every rank: logits and greedy tokens are those of one process, and something is cut."""
    model, plain = load(folder, kind, allow_replicated=True).eval(), kind.from_pretrained(folder).eval()
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_") and name != "labels"}
    with torch.no_grad():
        assert relative(model(**inputs).logits, plain(**inputs).logits) < LOGITS_TOLERANCE
    assert torch.equal(*(each.generate(**prompt, max_new_tokens=6, do_sample=False) for each in (model, plain)))
    assert any(param.tp_shard.layout is not None for param in model.parameters())


@pytest.mark.parametrize("size", [pytest.param(2), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_what_a_processor_makes_is_answered_as_by_one_process(pool, tmp_path, name, size) -> None:
    family = FAMILIES[name]
    model = family.model()
    inputs = family.inputs(model.config)
    assert inputs.keys() & {"pixel_values", "input_features"}
    save_as_loaded(model, tmp_path)
    try:
        model(**inputs)
    except AttributeError as error:  # Llama 4 in transformers 5.24 reads image_outputs of what has none
        pytest.skip(f"transformers {transformers.__version__} does not answer in one process: {error}")
    pool.run(size, compare_with_processed, str(tmp_path / "checkpoint"), type(model), inputs)
