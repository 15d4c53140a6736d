"""A loop with accelerate, started by it: accelerate launch --multi_gpu --num_processes 2 accelerated.py [MODEL]"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(name)
texts = ["The sky is blue.", "Grass is green.", "Snow is white.", "Coal is black."]
batches = DataLoader([tokenizer(text, return_tensors="pt").input_ids[0, :4] for text in texts], batch_size=2)
optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), lr=1e-4)
# The model and its batches are not prepared: all ranks take the same batches.
accelerator = Accelerator(cpu=model.device.type == "cpu")
losses = []
for batch in batches:
    batch = batch.to(model.device)
    loss = model(batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print("losses", *losses)
