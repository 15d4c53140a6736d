"""TRL's SFTTrainer: torchrun --nproc-per-node 2 sft.py [--lora] [MODEL]"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import tp_transformers

tp_transformers.enable()
name = next((each for each in sys.argv[1:] if each != "--lora"), "HuggingFaceTB/SmolLM2-135M-Instruct")
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]) if "--lora" in sys.argv else None

texts = ["The sky is blue.", "Grass is green.", "Snow is white.", "Coal is black.", "Blood is red.", "Gold is yellow."]
arguments = SFTConfig(
    "trained-sft",
    max_steps=3,
    per_device_train_batch_size=2,
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32"),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),  # or datasets.load_dataset(...)
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=lora,
)
trainer.train()
trainer.save_model()  # on all ranks; one of them writes
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print("losses", *losses)
