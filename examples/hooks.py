"""Interpretability: hidden states by hooks, and activation patching: torchrun --nproc-per-node 2 hooks.py [MODEL]

The outputs of embeddings, attentions, MLPs, layers and norms are complete on every rank, so that hooks read and write
them as in one process. Inside of an attention or an MLP, outputs are this rank's features. All ranks run all hooks.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(name)
layers = model.model.layers
clean, other = (tokenizer(text, return_tensors="pt").to(model.device) for text in ("The sky is", "The sea is"))

kept = {}
for index, layer in enumerate(layers):
    layer.mlp.register_forward_hook(lambda module, args, output, at=index: kept.update({at: output.clone()}))
with torch.no_grad():
    expected = model(**clean).logits[0, -1]
states = dict(kept)
norms = [states[index].norm().item() for index in range(len(layers))]
effects = []
for index, layer in enumerate(layers):  # what of the clean run, put into the other, brings its answer back?
    handle = layer.mlp.register_forward_hook(lambda module, args, output, at=index: states[at])
    with torch.no_grad():
        effects.append((model(**other).logits[0, -1] - expected).norm().item())
    handle.remove()
if model.tp_group.rank == 0:
    print("norms", *norms)
    print("effects", *effects)
