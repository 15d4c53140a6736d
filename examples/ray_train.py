"""A loop of one's own on workers of Ray Train, on any nodes: python ray_train.py [MODEL [RANKS [FOLDER]]]"""

import sys

import ray.train
import torch
from ray.train.torch import TorchTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers


def train(config):
    """What each worker runs: Ray has set its rank, its device, and started torch's process group."""
    tp_transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(config["name"], tp_plan="auto", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(config["name"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for text in ["The sky is blue.", "Grass is green.", "Snow is white."]:
        ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ray.train.report({"loss": loss.item()})
        if ray.train.get_context().get_world_rank() == 0:
            print("loss", loss.item())
    model.save_pretrained(config["folder"])  # on all workers; that of rank 0 writes


def main():
    """Start the workers, and wait until they have ended."""
    given = ("HuggingFaceTB/SmolLM2-135M-Instruct", "2", "trained")
    name, ranks, folder = (*sys.argv[1:], *given[len(sys.argv) - 1 :])
    workers = ray.train.ScalingConfig(num_workers=int(ranks), use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config={"name": name, "folder": folder}, scaling_config=workers).fit()
    print("saved", folder)


if __name__ == "__main__":
    main()
