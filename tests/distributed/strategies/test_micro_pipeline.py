"""Collectives of sequence parallelism under torch.compile, in the form that torch's micro-pipeline fuses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.models import load
from tests.support.on_ranks import on_ranks
from tp_transformers.ranks import direct

pytestmark = pytest.mark.slow

LAYERS = 1
TOKENS = torch.arange(1, 17).view(2, 8)


def matches(graph: torch.fx.Graph) -> dict[str, int]:
    """Collectives of a graph, those that torch finds, and those of them that have a product where torch fuses one."""
    from torch._inductor.fx_passes import micro_pipeline_tp

    gathers = micro_pipeline_tp.find_all_gather_patterns(graph)
    scatters = micro_pipeline_tp.find_reduce_scatter_patterns(graph)
    names = [str(node.target).partition(".")[2] for node in graph.nodes]
    assert len(gathers) == names.count("all_gather_into_tensor.default")
    assert len(scatters) == names.count("reduce_scatter_tensor.default")
    return {
        "gathers": sum(bool(micro_pipeline_tp._find_consumer_matmuls(each.res_node)) for each in gathers),
        "scatters": sum(bool(micro_pipeline_tp._find_producer_matmul(each.input_node)) for each in scatters),
        "sums": sum(each.input_node.target is torch.ops.aten.add.Tensor for each in scatters),
    }


@on_ranks(2, heads=(8, 4), num_hidden_layers=LAYERS)
def test_gathers_and_scatters_of_layers_are_fused_with_products(folder) -> None:
    """In the graphs of a forward, of one in training, and of its backward, traced as for a GPU."""
    from torch._dynamo.backends.common import aot_autograd  # a second, which each run of the quick tests would wait for
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    model, found = load(folder, tp_sequence_parallel=True), {}

    def spy(kind: str) -> Any:
        def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Any:
            assert kind not in found, "a graph break"
            view_to_reshape(module)  # as Inductor does before it looks
            found[kind] = matches(module.graph)
            return module.forward

        return compile_graph

    backend = aot_autograd(
        fw_compiler=spy("training"),
        bw_compiler=spy("backward"),
        inference_compiler=spy("inference"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    forward = torch.compile(model, backend=backend, fullgraph=True)

    def backend_alone(*_: Any) -> None:
        """No operators: ranks of a CPU would send through shared memory."""

    with mock.patch.object(direct, "_operators", backend_alone):
        with torch.no_grad():
            forward(TOKENS, use_cache=False)
        forward(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    blocks = 2 * LAYERS
    assert found["inference"] == found["training"] == {"gathers": blocks, "scatters": blocks, "sums": 0}
    # Column-parallel linears of a block share their input, whose gradients are added up before they are scattered.
    assert found["backward"] == {"gathers": blocks, "scatters": 0, "sums": blocks}
