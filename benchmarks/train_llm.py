"""Train a language model on text, on one process or on a mesh of ranks: `python -m benchmarks.train_llm`.

    python -m benchmarks.train_llm --model FOLDER --text FILE                   # one process, plain transformers
    torchrun --nproc-per-node 4 -m benchmarks.train_llm --model FOLDER --text FILE --dp 2 --tp 2

The batch of a step depends only on the seed and the step number, so that every mode has the same losses, and a run can
be resumed on another mesh. The log is OUT/log.jsonl, its plot OUT/loss.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

import tp_transformers
from tp_transformers.errors import TensorParallelError, UsageError
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.ranks.mesh import join

from . import trainee
from .corpus import Corpus, read_dataset, read_text
from .meters import Log, Stopwatch, draw_loss, operations_per_token, peak_memory, peak_operations
from .report import at_least

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
"""Llama 2's. With torch's epsilon of 1e-8, the first steps move every weight by its gradient's sign, even for noise."""


def train(arguments: argparse.Namespace, world: TensorParallelGroup) -> None:
    """Train, log, and save as requested. Collective."""
    # 1. The ranks and their data. Ranks that share a copy of the model have the same batch.
    with world.agree():
        copies = check(arguments, world)
        copy = world.rank // (world.size // copies)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        checkpoint = arguments.resume and trainee.latest(arguments.resume)
    tokens = world.first_on_node(lambda _: read(arguments, tokenizer))  # the others read it from the cache
    with world.agree():
        corpus = Corpus(tokens, arguments.length, arguments.seed)
    # 2. The model and its optimizer.
    model = trainee.load(arguments, world)
    operations = operations_per_token(multiplied(model), model.config, arguments.length)
    peak = gpu_peak(arguments, world)
    optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), fused=True, **ADAMW)
    done = trainee.resume(checkpoint, model, optimizer) if checkpoint else 0
    # 3. The steps.
    autocast = torch.autocast(
        world.device.type, torch.bfloat16, enabled=arguments.dtype == "bf16" and not arguments.fsdp
    )
    watch = Stopwatch(world.device)
    sync = getattr(model, "set_requires_gradient_sync", None)
    positions = torch.arange(arguments.length, device=world.device)
    with world.agree():
        log = Log(arguments.out / "log.jsonl", about(arguments, world), done + 1) if world.rank == 0 else None
    bar = tqdm(total=arguments.steps, initial=done, disable=world.rank > 0, desc="train", unit="step")
    for step in range(done, arguments.steps):
        rate = arguments.lr * min(1, (step + 1) / max(arguments.warmup, 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(arguments.seed + step * copies + copy)
        watch.lap()
        parts = corpus.batch(step, arguments.batch).chunk(arguments.accumulate)
        loss = torch.zeros((), device=world.device)
        for number, part in enumerate(parts):
            ids = part.chunk(copies)[copy].to(world.device)
            watch.mark("data")
            if sync:
                sync(number == len(parts) - 1)
            with autocast:
                output = model(ids, position_ids=positions.expand_as(ids), labels=ids, use_cache=False)
            share = output.loss / len(parts)
            watch.mark("forward")
            share.backward()
            watch.mark("backward")
            loss += share.detach()
        norm = tp_transformers.clip_grad_norm_(model, arguments.clip or float("inf"))
        watch.mark("clip")
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("optimizer")
        # 4. Results: mean loss over all copies, times of this rank, peak memory of all ranks.
        seconds = watch.lap()
        losses, memories = zip(*world.gather((loss.item(), peak_memory(world.device))), strict=True)
        line = {
            "step": step + 1,
            "loss": sum(losses) / len(losses),
            "norm": norm.item(),
            "lr": rate,
            "tokens_per_second": arguments.batch * arguments.length / seconds["step"],
            "seconds": seconds,
            "memory": max(memories),
        }
        if peak:
            line["mfu"] = line["tokens_per_second"] * operations / (peak * world.size)
        if log is not None:
            log.write(line)
        bar.update()
        bar.set_postfix(loss=f"{line['loss']:.4f}", tokens_per_second=f"{line['tokens_per_second']:.0f}")
        if arguments.save_every and (step + 1) % arguments.save_every == 0:
            trainee.save(arguments.out / f"step-{step + 1}", step + 1, model, optimizer)
    bar.close()
    # 5. Save.
    if arguments.save_final:
        model.save_pretrained(arguments.out / "final")
    with world.agree():
        if log is not None:
            if arguments.save_final:
                tokenizer.save_pretrained(arguments.out / "final")
            drawn = draw_loss(arguments.out / "log.jsonl", arguments.out / "loss.png")
            print(f"{arguments.out}/log.jsonl" + (", loss.png" if drawn else "; no picture: pip install matplotlib"))


def check(arguments: argparse.Namespace, world: TensorParallelGroup) -> int:
    """Check the arguments against the ranks, and fill in --dp and --tp; returns the number of parts of a batch.

    Raises UsageError if they do not fit.
    """
    dp, tp, size = arguments.dp, arguments.tp, world.size
    dp = dp or (max(size // tp, 1) if tp else 1)
    tp = tp or max(size // dp, 1)
    if dp * tp != size:
        raise UsageError(
            "--dp and --tp",
            got=f"{dp} x {tp}",
            expected=f"{size} ranks, as many as were started",
            fix=f"Launch with torchrun --nproc-per-node {dp * tp}.",
        )
    arguments.dp, arguments.tp = dp, tp
    for name in ("sequence_parallel", "loss_parallel", "batch_sharded", "fsdp", "invariant"):
        if world.process_group is None and getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')}",
                got="one process, which trains as transformers does",
                expected="ranks",
                fix="Launch with torchrun --nproc-per-node N -m benchmarks.train_llm.",
            )
    copies = size if arguments.batch_sharded else dp
    if arguments.batch % (copies * arguments.accumulate):
        raise UsageError(
            "--batch",
            got=f"{arguments.batch} sequences",
            expected=f"a multiple of {copies} x {arguments.accumulate}, in which ranks and --accumulate cut it",
            fix="Choose another.",
        )
    return copies


def read(arguments: argparse.Namespace, tokenizer: Any) -> torch.Tensor:
    """The tokens of the text or of the data set."""
    if arguments.text is not None:
        return read_text(tokenizer, arguments.text)
    return read_dataset(tokenizer, arguments.dataset, arguments.split, arguments.column)


def multiplied(model: Any) -> int:
    """Number of parameters of the full model in matrix products: without an embedding that only the input uses."""
    config = model.config
    return model.num_parameters() - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def gpu_peak(arguments: argparse.Namespace, world: TensorParallelGroup) -> float | None:
    """Peak operations per second of a rank's GPU; None on a CPU, in fp32, and for an unknown GPU."""
    if world.device.type != "cuda" or arguments.dtype != "bf16":
        return None
    return peak_operations(torch.cuda.get_device_name(world.device))


def about(arguments: argparse.Namespace, world: TensorParallelGroup) -> dict[str, Any]:
    """Metadata of a run: its arguments, ranks and device."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return {**given, "ranks": world.size, "device": device}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_llm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint with its tokenizer: a folder, or a name on the Hub")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="a file of text")
    source.add_argument("--dataset", help="a data set on the Hub, or a folder of one (pip install datasets)")
    add("--split", default="train", help="of the data set (default: train)")
    add("--column", default="text", help="of the data set (default: text)")
    add("--length", type=at_least(2), default=512, help="tokens of a sequence (default: 512)")
    add("--batch", type=at_least(1), default=8, help="sequences of a step, of all ranks together (default: 8)")
    add("--accumulate", type=at_least(1), default=1, help="parts that a step's batch goes through in turn (default: 1)")
    add("--steps", type=at_least(1), default=100, help="(default: 100)")
    add("--lr", type=float, default=1e-4, help="learning rate of AdamW (default: 1e-4)")
    add("--warmup", type=at_least(0), default=10, help="steps in which it rises from zero (default: 10)")
    add("--clip", type=at_least(0, float), default=1.0, help="largest norm of all gradients; 0 for any (default: 1)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="to compute in; weights are fp32 (default: fp32)")
    add("--seed", type=int, default=0, help="of the order of sequences and of dropout (default: 0)")
    add("--dp", type=at_least(1), help="copies of the model (default: what --tp leaves, or 1)")
    add("--tp", type=at_least(1), help="ranks that a copy is cut over (default: what --dp leaves)")
    add("--sequence-parallel", action="store_true", help="cut norms and residuals along the sequence")
    add("--loss-parallel", action="store_true", help="cut logits and loss along the vocabulary")
    add("--batch-sharded", action="store_true", help="every rank of a copy takes sequences of its own")
    add("--invariant", action="store_true", help="the bits of one process, on any number of ranks")
    add("--fsdp", action="store_true", help="cut parameters and states over the copies too")
    add("--gradient-checkpointing", action="store_true", help="keep less of the forward, and compute it again")
    add("--out", type=Path, default=Path("train-out"), help="log, picture and checkpoints (default: train-out)")
    add("--save-every", type=at_least(0), default=0, help="steps between checkpoints OUT/step-N (default: none)")
    add("--save-final", action="store_true", help="write the model to OUT/final, as save_pretrained does")
    add("--resume", type=Path, help="go on with a checkpoint: the --out of a run, or a step-N in it; on any mesh")
    return parser.parse_args(argv)


def main() -> None:
    """Train; prints an argument error as one line, on all ranks."""
    arguments = parse()
    try:
        train(arguments, join())
    except (TensorParallelError, OSError) as error:
        sys.exit(f"train_llm: {error}")


if __name__ == "__main__":
    main()
