"""A strategy of your own, with the hooks that transformers documents: torchrun --nproc-per-node 2 strategy.py [MODEL]

It cuts gate_proj by its output features, as `colwise` does.
"""

import sys

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers
from tp_transformers.strategies import ParallelInterface, TensorParallelLayer


class Columns(TensorParallelLayer):
    """Rows of the weight, which are the output features of a linear: AABB -> AA, BB."""

    def __init__(self):
        super().__init__(output_layouts=Shard(-1))  # the features stay cut: down_proj takes them as they are

    def split_dim(self, param_type, ndim):
        """The dim of a parameter that is cut, evenly over any number of ranks; each reads its own bytes alone."""
        return 0

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, module, inputs, device_mesh):
        """Forward: the same input on all ranks. Backward: the sum of the gradients of their columns."""
        whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, outputs, device_mesh):
        """This rank's features."""
        return outputs


ParallelInterface.register_strategy("my_columns", Columns)
tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
plan = {"model.layers.*.mlp.gate_proj": "my_columns", "model.layers.*.mlp.up_proj": "colwise"}
plan |= {"model.layers.*.mlp.down_proj": "rowwise"}
model = AutoModelForCausalLM.from_pretrained(name, tp_plan=plan, dtype="float32")
inputs = AutoTokenizer.from_pretrained(name)("The sky is", return_tensors="pt").to(model.device)
loss = model(**inputs, labels=inputs["input_ids"]).loss
loss.backward()
gate = model.model.layers[0].mlp.gate_proj.weight
norm = torch.linalg.vector_norm(tp_transformers.full_tensor(gate, gate.grad))
if model.tp_group.rank == 0:
    print("loss", loss.item(), "norm", norm.item())
