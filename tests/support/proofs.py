"""The proof of every model type: `python -m tests.support.proofs` (`make proofs`) writes tests/data/proofs.json.

A type of transformers is taken with its default config. Its plan is bound to the model in its true shapes, for the
share of the largest rank. Then a small model of it is held against one process, with gradients, as `tp-transformers
verify` does it, but on ranks that are already there. A type that was proven with the plan files of today is passed
over, so that a run that was broken off goes on where it was. The pages' table is made of that file (`readme.py`).

    python -m tests.support.proofs                 all types that are not proven with these plan files
    python -m tests.support.proofs --seeds 3       all that are not proven with three models of other weights each
    python -m tests.support.proofs llama qwen3     these, whatever is known of them
    python -m tests.support.proofs --sample 10     ten: those that changed, then others, which are other ones every
                                                   day; nothing is written, and one that is no more proven is a fault
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.fractions import largest_fraction
from tests.support.pool import Pool, WorkerError
from tp_transformers import TensorParallelError
from tp_transformers.anatomy import fold_layers, inner_models
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import Resolution, resolve
from tp_transformers.plans.yaml_file import available_plans, read_plan_file

FILE = Path(__file__).parents[1] / "data" / "proofs.json"
KINDS: dict[str, Mapping[str, str]] = {
    "images and text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked text": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "text": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": {},
}
"""Kinds of models, each with the types that an Auto class knows; encoders are the types that only have a plan."""
OTHERS = {"omniasr_ctc": "", "wavtokenizer": ": a codec of convolutions and an LSTM"}
"""Further types, made by AutoModel -> why no plan shards them."""
PROVEN_ON = (2, 3)
SHARES_OF = (2, 3, 4)
SECONDS = 240
"""Longest proof of a type, on one number of ranks."""
BYTES = 6 << 30
"""Most memory of a process, so that a type whose small model is large fails by itself."""
NOTED = 0.02
"""Smallest part of a model, by bytes, that is told of as whole."""

MIXED = ["attention" if layer % 8 == 5 else "mamba" for layer in range(32)]
OMNI = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
NEEDED: dict[str, dict[str, Any]] = {
    "apertus1p5": {  # small codebooks, whose tokens a small vocabulary has
        "image_token_offset": 64,
        "audio_token_offset": 80,
        "vision_config": {"codebook_size": 16},
        "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 16},
    },
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}}
    },
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "granitemoehybrid": {"layer_types": MIXED},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 1e3,
                "mrope_section": [16, 16, 16, 16],
            },
        }
    },
    "jamba": {"num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["full_attention" if layer % 4 == 2 else "conv" for layer in range(32)]},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_5_omni_thinker": {**OMNI, "audio_start_token_id": 151647, "audio_end_token_id": 151648},
    "qwen3_omni_moe_thinker": {
        **OMNI,
        "audio_start_token_id": 151669,
        "audio_end_token_id": 151670,
        "text_config": {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    },
    "reformer": {"is_decoder": True},
    "step3p7": {
        "text_config": {
            "sliding_window": 512,
            "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(45)],
        }
    },
}
"""Fields of configs whose defaults make no model, or one of no use."""


@dataclasses.dataclass
class Proof:
    """All that is known of a model type."""

    kinds: list[str]
    release: str = ""
    """Release of transformers that it was looked at with."""
    plans: dict[str, str] = dataclasses.field(default_factory=dict)
    """Plan file -> digest of its rules, for the plans that shard the model and its inner models."""
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    """Ranks -> the bytes of the largest rank, as a fraction of the model in its default shape."""
    whole: dict[str, float] = dataclasses.field(default_factory=dict)
    """Parameters, with folded names, that every rank holds -> their part of the model, by bytes."""
    output: float | None = None
    """Worst relative error of logits or states, over ranks and sizes."""
    gradient: float | None = None
    proven: list[int] = dataclasses.field(default_factory=list)
    """Numbers of ranks on which it computed what one process computes, with the weights of every seed."""
    seeds: int = 1
    """Number of small models of other weights that it was held against."""
    notes: list[str] = dataclasses.field(default_factory=list)
    refused: str = ""
    """Reason that it does not load."""
    unproven: str = ""
    """Reason that it loads, but is not proven on all of PROVEN_ON."""
    unmade: str = ""
    """Reason that one process cannot make a model of the default config."""


def types() -> dict[str, list[str]]:
    """Every model type, with its kinds."""
    found: dict[str, list[str]] = {}
    for kind, names in KINDS.items():
        for model_type in names:
            found.setdefault(model_type, []).append(kind)
    for model_type in (*available_plans(), *OTHERS):
        if model_type in CONFIG_MAPPING:
            found.setdefault(model_type, ["encoder"])
    return dict(sorted(found.items()))


@cache
def digest(file: str) -> str:
    """A short hash of the rules of a plan and of those that it extends; comments and other types do not matter."""
    directory = next(iter(available_plans().values())).parent
    data = read_plan_file(directory / file)
    base = data.get("extends")
    known = dict(data, model_type=None)
    if isinstance(base, str) and base != "declared":
        path = directory / f"{base}.yaml"
        known["extends"] = digest(path.name if path.is_file() else available_plans()[base].name)
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def is_current(model_type: str, proof: Proof, seeds: int) -> bool:
    """True if no plan file has changed or come since for the model, and it was held against `seeds` models or more."""
    return (
        proof.release == transformers.__version__
        and proof.seeds >= seeds
        and (bool(proof.plans) or model_type not in available_plans())
        and all(file in _files() and digest(file) == known for file, known in proof.plans.items())
    )


@cache
def _files() -> frozenset[str]:
    return frozenset(path.name for path in available_plans().values())


def read() -> dict[str, Proof]:
    """What is known, by type."""
    if not FILE.is_file():
        return {}
    return {name: Proof(**data) for name, data in json.loads(FILE.read_text(encoding="utf-8")).items()}


def write(proofs: Mapping[str, Proof]) -> None:
    """Keep what is known; one line a type."""
    lines = (f"{json.dumps(name)}: {json.dumps(dataclasses.asdict(proof))}" for name, proof in sorted(proofs.items()))
    part = FILE.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    part.replace(FILE)


def plan_files(model: PreTrainedModel, plan: Plan) -> list[str]:
    """The names of the files that cut a model: its own, and those of its inner models."""
    inner_types = [inner.config.model_type for name, inner in inner_models(model) if name in plan.inner_models]
    named = [available_plans().get(model_type) for model_type in (model.config.model_type, *inner_types)]
    return list(dict.fromkeys(path.name for path in named if path is not None))


def whole_parameters(model: PreTrainedModel, resolution: Resolution) -> dict[str, float]:
    """Parameters that every rank holds, layers folded, with their part of the model where that is at least NOTED."""
    sizes: dict[str, int] = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        if resolution.layouts.get(name) is None:
            folded = fold_layers(name)
            sizes[folded] = sizes.get(folded, 0) + param.nbytes
    total = sum(param.nbytes for param in params.values())
    shares = {name: round(size / total, 3) for name, size in sizes.items() if size >= NOTED * total}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


@contextmanager
def one_line(proof: Proof, reason: str) -> Iterator[None]:
    """Keep the message of an error of ours as the `reason` in the proof; any other is told with its type."""
    try:
        yield
    except TensorParallelError as error:
        setattr(proof, reason, shortened(str(error)))
    except Exception as error:
        setattr(proof, reason, shortened(f"{type(error).__name__}: {error}"))


def shortened(message: str) -> str:
    """The beginning of a message, in one line, without the folders of this machine and our own help."""
    told = re.sub(r"(?<![\w.])/[\w./-]*/", "", " ".join(message.split()))
    return textwrap.shorten(told.partition(", expected a model that transformers can make")[0], 240, placeholder=" ...")


def prove(model_type: str, kinds: list[str], seeds: int, pool: Pool) -> Proof:
    """Look at a model type in its default shape, and hold a small model of it, `seeds` times, against one process."""
    from tp_transformers.features.command_line.models import model_class
    from tp_transformers.features.verify.rank import run_rank
    from tp_transformers.features.verify.small_models.config import meta_model
    from tp_transformers.verify import verify

    proof = Proof(kinds, release=transformers.__version__, seeds=seeds)
    with one_line(proof, "unmade"):
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
        if kinds == ["masked text"]:
            config.architectures = [KINDS["masked text"][model_type]]
        model = meta_model(model_class(config), config)
    if proof.unmade:
        return proof
    with one_line(proof, "refused"):
        plan = Plan.for_model(model)
        if plan is None:
            proof.refused = f"no plan{OTHERS.get(model_type, '')}"
            return proof
        proof.plans = {file: digest(file) for file in plan_files(model, plan)}
        for size in SHARES_OF:
            resolution = resolve(plan, model, size)
            proof.shares[str(size)] = round(largest_fraction(model, resolution.layouts, size), 3)
            proof.whole = whole_parameters(model, resolution)
    loads = [size for size in PROVEN_ON if str(size) in proof.shares]
    if not loads:
        return proof

    def launch(folder: Path, reports: Path, size: int, timeout: float) -> int:
        try:
            pool.run(size, run_rank, folder, reports, time.time() + 0.9 * timeout, timeout=timeout)
        except WorkerError as error:
            (reports / "output").write_text(str(error), encoding="utf-8")
            return 1
        return 0

    with one_line(proof, "unproven"):
        verdicts = [
            verdict
            for seed in range(seeds)
            for verdict in verify(config, sizes=loads, grads=True, timeout=SECONDS, seed=seed, launch=launch)
        ]
        proof.output = max((verdict.logits for verdict in verdicts if verdict.logits is not None), default=None)
        proof.gradient = max((verdict.gradient[1] for verdict in verdicts if verdict.gradient), default=None)
        proof.proven = [size for size in loads if all(verdict.ok for verdict in verdicts if verdict.size == size)]
        proof.notes = list(dict.fromkeys(note for verdict in verdicts for note in verdict.notes if "tried" in note))
        faults = (f"{v.size} ranks: {' '.join(fault.split())}" for v in verdicts for fault in v.faults)
        proof.unproven = shortened(next(faults, ""))
    return proof


_pool: list[Pool] = []


def _start() -> None:
    """Prepare a process that proves."""
    import torch

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    _pool.append(Pool())


def _prove(model_type: str, kinds: list[str], seeds: int) -> tuple[Proof, float]:
    start = time.monotonic()
    return prove(model_type, kinds, seeds, _pool[0]), time.monotonic() - start


def proven(names: Iterable[str], seeds: int, processes: int) -> Iterator[tuple[str, Proof, float]]:
    """(type, what was found, seconds) of every type of `names`, as they come."""
    every, context, left = types(), multiprocessing.get_context("spawn"), list(names)
    while left:  # new processes now and then: a type that failed for lack of memory may leave little
        some, left = left[: 25 * processes], left[25 * processes :]
        with ProcessPoolExecutor(processes, context, _start) as executor:
            asked = {name: executor.submit(_prove, name, every[name], seeds) for name in some}
            for name, answer in asked.items():
                yield name, *answer.result()


def summary(proofs: Mapping[str, Proof]) -> str:
    """A line a kind: how many types can be made, load, are proven, and hold at most .58 on 2 ranks."""
    lines = []
    for kind in KINDS:
        made = [proof for proof in proofs.values() if kind in proof.kinds and not proof.unmade]
        loads = [proof for proof in made if "2" in proof.shares]
        on_all = [proof for proof in loads if len(proof.proven) == len(PROVEN_ON)]
        small = [proof for proof in loads if proof.shares["2"] <= 0.58]
        lines.append(f"{kind}: {len(made)} types, {len(loads)} load, {len(on_all)} proven, {len(small)} at most .58")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all that are not proven with these plans)")
    parser.add_argument("--sample", type=int, metavar="N", help="prove N again, write nothing")
    parser.add_argument("--seeds", type=int, default=1, help="small models of a type (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="proofs at a time (default: 1)")
    arguments = parser.parse_args()
    every, known = types(), read()
    changed = [name for name in every if name not in known or not is_current(name, known[name], arguments.seeds)]
    names = arguments.types or changed
    if arguments.sample is not None:
        proven_before = [name for name, proof in known.items() if proof.proven and name in every]
        random.Random(int(time.time() // 86400)).shuffle(proven_before)
        names = sorted(proven_before, key=lambda name: name not in changed)[: arguments.sample]
    worse = []
    for name, proof, seconds in proven(names, arguments.seeds, arguments.processes):
        reason = proof.unmade or proof.refused or proof.unproven
        print(f"{name}: {proof.shares.get('2', '-')} of one of 2, proven on {proof.proven} {reason}", end=" ")
        print(f"({seconds:.0f} s)", flush=True)
        before = known.get(name)
        if before is not None and not set(before.proven) <= set(proof.proven):
            worse.append(name)
        if arguments.sample is None:
            known[name] = proof
            write({name: known[name] for name in known if name in every})
    print(summary(known))
    if worse:
        print(f"proven on fewer numbers of ranks than tests/data/proofs.json said: {', '.join(worse)}")
    return 1 if worse else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
