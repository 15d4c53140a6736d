"""Interpretability with nnsight: a logit lens, and an edit of neurons: torchrun --nproc-per-node 2 lens.py [MODEL]

nnsight shows full activations of every linear, layer and norm on all ranks, and edits of them are those of one process.
All ranks run the same trace.
"""

import sys

import nnsight
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(name)
tree = nnsight.NNsight(model)
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
layers = tree.model.layers

with torch.no_grad(), tree.trace(ids):
    lens = nnsight.save([])
    for layer in layers:
        lens.append(tree.lm_head(tree.model.norm(layer.output))[0, -1].argmax())
    logits = tree.lm_head.output[0, -1].save()

with torch.no_grad(), tree.trace(ids):
    neurons = layers[1].mlp.gate_proj.output  # each rank computes a part of them
    strongest = neurons[0, -1].argmax().save()
    neurons[..., strongest] = 0
    edited = tree.lm_head.output[0, -1].save()

if model.tp_group.rank == 0:
    print("lens", *map(repr, tokenizer.batch_decode(torch.stack(lens)[:, None])))
    print("without neuron", strongest.item(), "the logits change by", (edited - logits).norm().item())
