"""lm_eval with a model that is loaded here: torchrun --nproc-per-node 2 harness.py [MODEL [TASKS [FOLDER]]]

TASKS has commas between names, FOLDER has tasks of your own in YAML. "-m tp_transformers -m lm_eval --model_args
pretrained=MODEL,tp_plan=auto", in place of this script, is lm_eval's own command line.
"""

import sys

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import tp_transformers

tp_transformers.enable()
name, tasks, folder = (*sys.argv[1:], *("HuggingFaceTB/SmolLM2-135M-Instruct", "arc_easy", None)[len(sys.argv) - 1 :])
model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto", dtype="float32")
results = simple_evaluate(
    HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(name), batch_size=4),
    tasks=tasks.split(","),
    task_manager=TaskManager(include_path=folder),
    limit=100,
    bootstrap_iters=0,
)
if model.tp_group.rank == 0:
    for task, found in results["results"].items():
        print(task, *(f"{key} {value}" for key, value in found.items() if isinstance(value, float)))
