"""TRL's GRPOTrainer; all ranks sample the same completions: torchrun --nproc-per-node 2 grpo.py [MODEL]"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"


def spaces(completions: list[str], **_: object) -> list[float]:
    """The reward: many short words."""
    return [float(each.count(" ")) for each in completions]


arguments = GRPOConfig(
    "trained-grpo",
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
)
set_seed(1)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32"),
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": ["The sky is", "Grass is", "Snow is", "Coal is"]}),
    processing_class=AutoTokenizer.from_pretrained(name),
    reward_funcs=spaces,
)
trainer.train()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "reward" in entry]
trainer.accelerator.print("rewards", *rewards, "norms", *norms)
