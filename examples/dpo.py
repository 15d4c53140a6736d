"""TRL's DPOTrainer: torchrun --nproc-per-node 2 dpo.py [MODEL]"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
pairs = {
    "prompt": ["The sky is", "Grass is", "Snow is", "Coal is"],
    "chosen": [" blue.", " green.", " white.", " black."],
    "rejected": [" a lie.", " a dog.", " a car.", " a cat."],
}
arguments = DPOConfig(
    "trained-dpo",
    max_steps=3,
    per_device_train_batch_size=2,
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
)
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32"),
    args=arguments,
    train_dataset=Dataset.from_dict(pairs),
    processing_class=AutoTokenizer.from_pretrained(name),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print("losses", *losses)
