"""XLNet's attention, which multiplies with parameters of its own, in any number of heads, held against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from tests.support.architectures import gradient_errors
from tests.support.models import (
    MASK,
    PROMPTS,
    VOCAB,
    bytes_read,
    headers,
    held,
    load,
    read_folder,
    relative,
)
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers.infer.small.model import computing_in, convert

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9  # float64: only the order of the sums differs


def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers: with one stream, and with that of queries for a token."""
    convert(model, torch.float64)
    batch, length = PROMPTS.shape
    last, unseen = torch.zeros(batch, 1, length).double(), torch.zeros(batch, length, length).double()
    last[:, 0, -1], unseen[:, :, -1] = 1, 1
    found: dict[str, Any] = {"outputs": [], "attentions": [], "grads": {}}
    with computing_in(torch.float64):
        for given in ({}, {"target_mapping": last, "perm_mask": unseen}):
            answer = model(
                PROMPTS, attention_mask=MASK.double(), token_type_ids=PROMPTS % 2, output_attentions=True, **given
            )
            noise = torch.randn(answer.logits.shape, generator=torch.Generator().manual_seed(2))
            (answer.logits * noise).sum().backward()
            found["outputs"].append(answer.logits.detach())
            found["attentions"] += tree_leaves(answer.attentions)
        made = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {**found, "tokens": made, "grads": grads}


def compare(folder: str, saved: str) -> dict[str, Any]:
    """Run on every rank: the largest differences from one process, and what a dropout leaves in training."""
    model = load(folder, dtype=torch.float64)
    read = bytes_read(model) - held(model) - headers(folder)
    seen, expected = observe(model), torch.load(Path(folder).parent / "reference.pt")
    model.save_pretrained(saved)
    assert seen["grads"].keys() == expected["grads"].keys()
    errors = {
        key: max(relative(own, whole) for own, whole in zip(seen[key], expected[key], strict=True))
        for key in ("outputs", "attentions")
    }
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    torch.manual_seed(3)
    with computing_in(torch.float64):
        dropped = model.train()(PROMPTS, attention_mask=MASK.double()).logits
    return {
        **errors,
        "gradients": max(gradient_errors(model, seen["grads"], expected["grads"]).values()),
        "tokens": torch.equal(seen["tokens"], expected["tokens"]),
        "read": read,
        "dropped": dropped.detach(),
    }


@pytest.mark.parametrize(("size", "heads"), wide([(3, 8), (2, 8), (4, 8), (2, 3), (3, 3), (4, 3)], 1))
def test_products_with_parameters_that_are_cut(pool: Pool, tmp_path: Path, size: int, heads: int) -> None:
    torch.manual_seed(0)
    model = transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(
            vocab_size=VOCAB, d_model=12 * heads, n_layer=2, n_head=heads, d_inner=50, dropout=0.0, pad_token_id=0
        )
    ).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(tmp_path / "first")
    model = type(model).from_pretrained(tmp_path / "first", dtype=torch.float64)
    model.save_pretrained(tmp_path / "checkpoint")
    torch.save(observe(model.eval()), tmp_path / "reference.pt")
    results = pool.run(size, compare, str(tmp_path / "checkpoint"), str(tmp_path / "saved"))
    for seen in results:
        assert max(seen["outputs"], seen["attentions"], seen["gradients"]) < TOLERANCE
        assert seen["tokens"]
        assert seen["read"] == 0
        assert torch.equal(seen["dropped"], results[0]["dropped"])  # the ranks drop the same of what they share
    saved = read_folder(tmp_path / "saved")  # one process saves some in float32, of another dtype in config.json
    for name, value in read_folder(tmp_path / "checkpoint").items():
        assert torch.equal(saved.pop(name), value.double()), name
    assert not saved
