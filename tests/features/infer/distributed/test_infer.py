"""`tp_plan="infer"`: models that nobody planned for, two of them with their own code, against one process."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_errors, gradients, relative, worst
from tests.support.logged import logged
from tests.support.models import MASK, PROMPTS, load, save_as_loaded
from tests.support.remote_code import split_by_own_widths, with_code
from tests.support.tiers import wide
from tests.support.unplanned import unplanned


def inferred(folder: str, share: float, **arguments: Any) -> str:
    """Run on every rank: the model is that of one process, no rank holds more than `share` of it; what was told."""
    with logged() as told:
        model = load(folder, tp_plan="infer", **arguments)
    plain = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    outputs = [each(PROMPTS, attention_mask=MASK, labels=PROMPTS) for each in (model, plain)]
    for output in outputs:
        output.loss.backward()
    assert relative(outputs[0].logits.detach(), outputs[1].logits.detach()) < LOGITS_TOLERANCE
    assert worst(gradient_errors(model, gradients(model), gradients(plain)))[1] < GRADIENT_TOLERANCE
    asked = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(PROMPTS, **asked), plain.generate(PROMPTS, **asked))
    assert max(model.tp_report.shares) < share * sum(param.nbytes for param in plain.parameters())
    return "\n".join(told)


@pytest.mark.parametrize("size", wide([2, 3], 1))
@pytest.mark.parametrize("name", ["parallel", "fused"])
def test_a_model_with_its_own_code_is_cut(pool, tmp_path, name, size) -> None:
    settings = {"hidden_size": 72, "num_attention_heads": 9} if size == 3 else {}
    settings |= {"num_key_value_heads": 3} if size == 3 and name == "parallel" else {}
    folder = with_code(tmp_path / "model", name, **settings)
    pool.run(size, partial(inferred, trust_remote_code=True), folder, 1 / size + 0.06)


def test_a_fused_projection_of_own_widths_stays_whole(pool, tmp_path) -> None:
    folder = with_code(tmp_path / "model", "fused")
    split_by_own_widths(folder)
    said, _ = pool.run(2, partial(inferred, trust_remote_code=True), folder, 0.8)
    assert "replicated  blocks.*.attend.back, blocks.*.attend.qkv: one forward of rank 0's shards" in said
    assert "split_with_sizes" in said


def test_an_architecture_without_a_plan_is_cut(pool, tmp_path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(unplanned("falcon_h1"))
    save_as_loaded(model, tmp_path)
    pool.run(2, inferred, str(tmp_path / "checkpoint"), 0.8)


def test_one_that_does_not_run_is_one_error_on_all_ranks(pool, tmp_path) -> None:
    folder = with_code(tmp_path / "model", "fused")
    code = tmp_path / "model" / "modeling_fused.py"
    code.write_text(code.read_text().replace("x = self.tokens(input_ids)", "x = self.absent(input_ids)"))
    error = pool.error(2, partial(load, tp_plan="infer", trust_remote_code=True), folder)
    assert error.startswith("UnsupportedError: ")
    assert "a small fused_of_tomorrow: got AttributeError" in error
