"""LoRA by PEFT in a loop of your own, saved and merged: torchrun --nproc-per-node 2 lora.py [MODEL]"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
base = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
is_first = base.tp_group.rank == 0
torch.manual_seed(0)  # on all ranks: the adapter of one process
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
batch = tokenizer("The sky is green.", return_tensors="pt").to(base.device)
losses = []
for _ in range(5):
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained("adapter")  # on all ranks; rank 0 writes the adapter in full
merged = model.merge_and_unload()
merged.save_pretrained("merged")  # a model without an adapter, for any number of ranks and any program
if is_first:
    tokenizer.save_pretrained("merged")

inputs = tokenizer("The sky is", return_tensors="pt").to(base.device)
tokens = merged.generate(**inputs, max_new_tokens=3, do_sample=False)
if is_first:
    print("losses", *losses)
    print(repr(tokenizer.decode(tokens[0])))
