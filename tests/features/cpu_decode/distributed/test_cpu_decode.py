"""Decoding in bfloat16 on CPU ranks, beside one process without this package."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

from tests.support.models import PROMPTS, load
from tp_transformers.features.cpu_decode import products

pytestmark = pytest.mark.distributed


def decoded(model: Any, tokens: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of six steps, greedy or along `tokens`: (6, vocabulary), (13,)."""
    if tokens is not None:
        options["prefix_allowed_tokens_fn"] = lambda _, ids: [int(tokens[len(ids)])]
    output = model.generate(
        PROMPTS[1:],
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.cat(output.logits), output.sequences[0]


def decode(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(products, "onednn_is_slow", return_value=True):
        return decoded(load(folder, dtype=torch.bfloat16), tokens)[0]


def decode_compiled(folder: str, tokens: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The logits, and the numbers of linears and of operators for a row in all graphs."""
    targets: list[Any] = []

    def compile_graph(graph: torch.fx.GraphModule, example: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=compile_graph, mode=None)
    config._compile_all_devices = True
    with mock.patch.object(products, "onednn_is_slow", return_value=True):
        model = load(folder, dtype=torch.bfloat16)
    logits, _ = decoded(model, tokens, cache_implementation="static", compile_config=config)
    kinds = (torch.nn.functional.linear, torch.ops.tp_transformers.row_linear.default)
    return logits, [targets.count(kind) for kind in kinds]


@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_are_as_exact_as_those_of_one_process(pool: Any, cases: Any, ranks: int) -> None:
    folder = cases(9, 3).folder
    exact, tokens = decoded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    alone, _ = decoded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    for logits in pool.run(ranks, decode, folder, tokens):
        assert (logits - exact).norm() < 1.5 * (alone - exact).norm()


def test_a_compiled_model_multiplies_rows_in_one_graph(pool: Any, cases: Any) -> None:
    folder = cases(9, 3).folder
    exact, tokens = decoded(reference := AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    alone, _ = decoded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    linears = sum(isinstance(module, torch.nn.Linear) for module in reference.modules())
    for logits, kinds in pool.run(2, decode_compiled, folder, tokens):
        assert kinds == [0, linears]
        assert (logits - exact).norm() < 1.5 * (alone - exact).norm()
