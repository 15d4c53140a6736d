"""Shares for unlike devices: torchrun --nproc-per-node 2 shares.py [MODEL [SHARES]]

SHARES is `2,1`, with a number for each rank, or `memory`, or `speed`; without SHARES the first rank gets most.
"""

import os
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
ranks = int(os.environ.get("WORLD_SIZE", 1))
given = sys.argv[2] if len(sys.argv) > 2 else ",".join(map(str, range(ranks, 0, -1)))
shares = given if given in ("memory", "speed") else [float(share) for share in given.split(",")]
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", tp_shares=shares, dtype="float32")
print(f"rank {model.tp_group.rank} holds {model.get_memory_footprint() / 1e6:.0f} MB", file=sys.stderr)

tokenizer = AutoTokenizer.from_pretrained(name)
inputs = tokenizer("The sky is", return_tensors="pt").to(model.device)
tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
if model.tp_group.rank == 0:
    print(repr(tokenizer.decode(tokens[0])))
