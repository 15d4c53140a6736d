"""transformers' Trainer on copies of a model, each cut: torchrun --nproc-per-node 4 train_dp_tp.py [MODEL [COPIES]]"""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import tp_transformers

tp_transformers.enable()
name, copies = (*sys.argv[1:], *("HuggingFaceTB/SmolLM2-135M-Instruct", "2")[len(sys.argv) - 1 :])
device, ranks = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("WORLD_SIZE", 1))
mesh = init_device_mesh(device, (int(copies), ranks // int(copies)), mesh_dim_names=("dp", "tp"))
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", device_mesh=mesh, dtype="float32")
tp_transformers.data_parallel(model, mesh, mode="shard")  # FSDP2; "replicate" averages gradients alone

tokenizer = AutoTokenizer.from_pretrained(name)
texts = ["The sky is blue.", "Grass is green.", "Snow is white.", "Coal is black.", "Blood is red.", "Gold is yellow."]
data = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text).input_ids[:4] for text in texts)]
arguments = TrainingArguments(
    "trained",
    max_steps=3,
    per_device_train_batch_size=2 // int(copies),  # of each copy
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=device == "cpu",
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model()  # on all ranks; one of them writes
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print("losses", *losses)
