"""XLNet's attention, which multiplies with parameters of its own, in any number of heads, held against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from tests.support.architectures import compare_case, in_float64
from tests.support.comparisons import ranks_agree, read_folder
from tests.support.models import MASK, PROMPTS, VOCAB, Case, load, save_as_loaded, save_reference
from tests.support.tiers import wide
from tp_transformers.features.verify.small_models.model import computing_in

TOLERANCE = 1e-9  # float64: only the order of the sums differs


@in_float64
def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers: with one stream, and with that of queries for a token."""
    batch, length = PROMPTS.shape
    last, unseen = torch.zeros(batch, 1, length).double(), torch.zeros(batch, length, length).double()
    last[:, 0, -1], unseen[:, :, -1] = 1, 1
    outputs: dict[str, list[Any]] = {"logits": [], "attentions": []}
    for given in ({}, {"target_mapping": last, "perm_mask": unseen}):
        answer = model(
            PROMPTS, attention_mask=MASK.double(), token_type_ids=PROMPTS % 2, output_attentions=True, **given
        )
        noise = torch.randn(answer.logits.shape, generator=torch.Generator().manual_seed(2))
        (answer.logits * noise).sum().backward()
        outputs["logits"].append(answer.logits.detach())
        outputs["attentions"] += tree_leaves(answer.attentions)
    made = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    return {"outputs": outputs, "tokens": made, "bytes": {}}


def compare_and_drop(case: Case, saved: str) -> None:
    """Run on every rank: the numbers of one process, and in training the ranks drop the same of what they share."""
    model = load(case.folder, dtype=torch.float64)
    seen = compare_case(model, case, observe, saved)
    assert max(seen["logits"], seen["attentions"], seen["gradient"][1]) < TOLERANCE
    assert seen["tokens"]
    assert seen["read"] == 0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    torch.manual_seed(3)
    with computing_in(torch.float64):
        dropped = model.train()(PROMPTS, attention_mask=MASK.double()).logits
    assert ranks_agree(dropped.detach())


@pytest.mark.parametrize(("size", "heads"), wide([(3, 8), (2, 8), (4, 8), (2, 3), (3, 3), (4, 3)], 1))
def test_products_with_parameters_that_are_cut(pool, tmp_path, size, heads) -> None:
    torch.manual_seed(0)
    model = transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(
            vocab_size=VOCAB, d_model=12 * heads, n_layer=2, n_head=heads, d_inner=50, dropout=0.0, pad_token_id=0
        )
    ).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.2)
    case = save_reference(observe(save_as_loaded(model, tmp_path).eval()), tmp_path)
    pool.run(size, compare_and_drop, case, str(tmp_path / "saved"))
    saved = read_folder(tmp_path / "saved")  # one process saves some in float32, of another dtype in config.json
    for name, value in read_folder(case.folder).items():
        assert torch.equal(saved.pop(name), value.double()), name
    assert not saved
