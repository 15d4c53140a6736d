"""Hashes of the inputs that ranks compare."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import ModelOutput

from tp_transformers.features.debug.same_inputs import fingerprint

IDS = torch.tensor([[3, 5, 7]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IDS, IDS + 1),
        (IDS, IDS[0]),
        (IDS, IDS.int()),
        (IDS.float(), IDS.float() * (1 + 1e-6)),
        (IDS.bfloat16(), -IDS.bfloat16()),
        (IDS, torch.full((), 3)),
        (GenerationConfig(top_k=3), GenerationConfig(top_k=4)),
        ({"ids": [IDS]}, {"ids": [IDS + 1]}),
        (ModelOutput(last=IDS), ModelOutput(last=IDS + 1)),
        ([[3, 4]], [[3, 5]]),
        ({4, 3}, {4, 5}),
        (LogitsProcessorList([TopKLogitsWarper(3)]), LogitsProcessorList([TopPLogitsWarper(0.5)])),
        (DynamicCache(), DynamicCache(((IDS[None, None].float(), IDS[None, None].float()),))),
        (3, "3"),
        (1, True),
    ],
)
def test_fingerprints_differ_exactly_where_values_do(one, other) -> None:
    assert fingerprint(one) != fingerprint(other)
    for value in (one, other):
        assert fingerprint(value) == fingerprint(value)
    assert fingerprint(IDS) == fingerprint(IDS.clone().T.contiguous().T)
