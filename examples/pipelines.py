"""Pipelines, by a name or with a model: torchrun --nproc-per-node 2 pipelines.py [MODEL]"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import tp_transformers

tp_transformers.enable()
name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
by_name = pipeline("text-generation", name, tp_plan="auto", dtype="float32")
answer = by_name("The sky is", **options)[0]["generated_text"]
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
with_model = pipeline("text-generation", model, tokenizer=AutoTokenizer.from_pretrained(name))
same = with_model("The sky is", **options)[0]["generated_text"]
if model.tp_group.rank == 0:
    print("by name", repr(answer), "with a model", repr(same))
