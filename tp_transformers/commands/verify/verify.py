"""Prove a plan: a small random model of the architecture, on ranks of this machine, held against one process.

The plan is first held against the model in its true shapes, which starts nothing. Then a small model of the same head
counts, experts and kinds of layers is written to a folder that lasts as long as the proof; one process computes logits,
greedy tokens and gradients from it, and so does every number of ranks, each by a start of torchrun.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, PretrainedConfig

from ...anatomy.classes import model_class
from ...errors import PlanError, UnsupportedError, UsageError, describe
from ...loading.from_pretrained import auto_plan, read_plan
from ...loading.hook import enable
from ...plans.bind import Resolution, resolve
from ...plans.rules import Plan
from ...plans.shares import check_layers_are_cut
from ...ranks.group import TP_AXIS
from ...ranks.launch import torchrun
from ...strategies import STRATEGIES, ParallelInterface, full_tensor
from . import small_model as probe
from .differences import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Differences, gradient_errors, relative
from .small_config import outline, shrink, supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Verdict:
    """What was seen on `size` ranks; numbers are None where they were not computed."""

    size: int
    faults: tuple[str, ...] = ()
    """What is wrong, each with the module or rule that it is about."""
    logits: float | None = None
    """Worst relative error of the logits, over the ranks."""
    loss: float | None = None
    """Worst relative error of the loss, of a model that takes labels, some of which are ignored."""
    tokens: bool | None = None
    """Whether all greedy tokens are those of one process."""
    gradient: tuple[str, float] | None = None
    """The parameter whose gradient has the worst relative error, and that."""
    notes: tuple[str, ...] = ()
    """What the proof does not cover, and what the plan leaves whole."""

    @property
    def ok(self) -> bool:
        """Whether the ranks compute what one process does."""
        return not self.faults


def verify(
    config: PretrainedConfig | str | Path,
    *,
    plan: str | Path | dict[str, Any] | Plan | None = None,
    sizes: Sequence[int] = (2,),
    grads: bool = False,
    timeout: float = 600,
) -> list[Verdict]:
    """Hold tensor parallelism on `sizes` ranks against one process, in fp64 on CPUs; returns a verdict for each size.

    Args:
        config: a config, the path of a config.json, a folder with one, or a name on the Hub; no weights are read.
        plan: as `tp_plan` of `from_pretrained`; None for the one that `tp_plan="auto"` takes.
        sizes: numbers of ranks.
        grads: whether gradients are compared too.
        timeout: seconds that the ranks of one size may take.

    Raises:
        UsageError: if there is no such config, or a size is not positive.
        PlanError: if the plan cannot be read, or there is none; one that does not fit the model is a fault.
        UnsupportedError: if transformers has no class for the config, or no small model of it can be made.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError(describe("sizes", got=str(list(sizes)), expected="numbers of 1 or more", fix="Give some."))
    config = read_config(config)
    cls, small = model_class(config), shrink(config)
    true, model = outline(cls, config), outline(cls, small)
    given = read_plan("auto" if plan is None else plan)
    chosen = given if isinstance(given, Plan) else auto_plan(true, quietly=True)
    verdicts: dict[int, Verdict] = {}
    resolutions: dict[int, Resolution] = {}
    for size in dict.fromkeys(sizes):
        try:
            resolution = resolve(chosen, true, size)
            warning = check_layers_are_cut(true, chosen, resolution, size) if chosen.declared else None
        except PlanError as error:
            verdicts[size] = Verdict(size, (str(error),))
            continue
        declared = f"no plan of ours for {config.model_type}: this is {chosen.source}" if chosen.declared else None
        verdicts[size] = Verdict(size, notes=tuple(filter(None, (declared, *resolution.notes, warning))))
        try:
            resolutions[size] = resolve(chosen, model, size)
        except PlanError as error:
            raise UnsupportedError(
                describe(
                    chosen.source,
                    got=f"a plan that fits the model, but not its small one: {error}",
                    expected="one whose parts and units are not lengths",
                    fix="Give parts by their number or by their heads.",
                )
            ) from error
    if resolutions:
        with tempfile.TemporaryDirectory(prefix="tp-verify-") as scratch:
            proof = _Proof(Path(scratch), cls, small, chosen, grads, timeout)
            for size, resolution in resolutions.items():
                verdicts[size] = proof.run(model, resolution, verdicts[size])
    return [verdicts[size] for size in sizes]


class _Proof:
    """A small model in a folder, and what one process makes of it."""

    def __init__(
        self,
        folder: Path,
        cls: type[PreTrainedModel],
        config: PretrainedConfig,
        plan: Plan,
        grads: bool,
        timeout: float,
    ) -> None:
        self.folder, self.grads, self.timeout = folder, grads, timeout
        self.sees = hasattr(config, "vision_config")
        with supported(f"a small {config.model_type}"):
            with torch.random.fork_rng(devices=[]):
                made = probe.make(cls, config)
                made.save_pretrained(folder / "checkpoint")
            try:
                self.dtype = torch.float64
                asked = self._ask(cls, made)
            except Exception:  # an operator of the model knows no float64
                self.dtype = torch.float32
                asked = self._ask(cls, made)
        torch.save((*asked, self.gradients), folder / "questions.pt")
        built_in = ParallelInterface()
        own = {name: strategy for name, strategy in STRATEGIES.items() if built_in.get(name) is not strategy}
        with (folder / "request.pickle").open("wb") as file:
            pickle.dump(sys.path, file)  # first: what follows may be of modules that are found by it
            pickle.dump((cls, plan, own, grads, self.dtype), file)

    def _ask(self, cls: type[PreTrainedModel], made: PreTrainedModel) -> tuple[Any, Any]:
        """Let one process answer, in `self.dtype`; returns the questions and the labels."""
        # Loaded, as ranks load it: what is converted while it loads has another form in a model that was made.
        model: PreTrainedModel = cls.from_pretrained(self.folder / "checkpoint", dtype=self.dtype)
        for name, param in made.named_parameters():  # what a class freezes may thaw when one process loads it
            model.get_parameter(name).requires_grad_(param.requires_grad)
        *asked, self.has_image = probe.questions(made)
        questions = [probe.in_dtype(question, self.dtype) for question in asked]
        self.whole = probe.Observation()
        with probe.computing_in(self.dtype):
            labels = probe.labels(model, questions[0])
            probe.observe(model, questions, self.whole, labels)
            self.gradients = probe.gradients(model, questions[0], labels) if self.grads else {}
        return questions, labels

    def run(self, model: PreTrainedModel, resolution: Resolution, verdict: Verdict) -> Verdict:
        """The verdict on one size; `verdict` has what was known before."""
        size = verdict.size
        reports = self.folder / f"ranks-{size}"
        reports.mkdir()
        with (reports / "output").open("wb") as output:
            deadline = time.time() + 0.9 * self.timeout  # of the ranks, so that they can say where they are
            program = ["-m", "tp_transformers.commands.verify.verify", str(self.folder), str(reports), str(deadline)]
            try:
                code = torchrun(program, ranks=size, timeout=self.timeout, output=output)
            except subprocess.TimeoutExpired:
                code = 1
        # In the order in which the ranks ended: where one fails, others may fail for that.
        ended = sorted(reports.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
        seen: dict[int, probe.Observation] = {int(path.stem): torch.load(path, weights_only=False) for path in ended}
        if code and len(seen) < size and all(found.failure is None for found in seen.values()):
            printed = (reports / "output").read_text(errors="replace").strip().splitlines()[-20:]
            lost = "\n    ".join(
                [f"a rank ended, or hung, without a report; what was printed last ({code}):", *printed]
            )
            return Verdict(size, (lost,), notes=verdict.notes)
        differences = Differences(model, resolution, size, self.whole.trace)
        return self._judge(verdict, seen, differences)

    def _judge(self, verdict: Verdict, seen: dict[int, probe.Observation], differences: Differences) -> Verdict:
        """Compare what the ranks saw with one process."""
        faults = []
        failed = {rank: found for rank, found in seen.items() if found.failure is not None}
        for rank, found in list(failed.items())[:1]:  # the others fail because it did, or say the same
            inside = found.trace.running[-1].name if found.trace.running else None
            where = f" (in {inside}; {differences.rule(inside)}) {differences.made_from(inside)}" if inside else ""
            faults.append(f"rank {rank}, {found.doing}: {found.failure}{where}".strip())
        worst = _worst("logits", seen, self.whole)
        if worst is not None and worst > OUTPUT_TOLERANCE:
            faults.append(f"the logits differ (relative error {worst:.1e})")
        loss = _worst("loss", seen, self.whole)
        if loss is not None and loss > OUTPUT_TOLERANCE and not faults:  # that of other logits is another one
            faults.append(f"the loss differs (relative error {loss:.1e}), though the logits agree")
        tokens = None
        if len(seen) == verdict.size and not failed:
            tokens = all(_same(found.tokens, self.whole.tokens) for found in seen.values())
            if not tokens:
                agree = ", though the logits of a whole prompt agree: see what its caches hold" * (not faults)
                faults.append(f"the greedy tokens differ{agree}")
        if faults:
            first = differences.first_output({rank: found.trace for rank, found in seen.items()})
            faults[:0] = [first] if first is not None else []
        gradient = None
        errors = [found.errors for found in seen.values() if found.errors]
        if errors:
            name, error = max(((name, max(e[name] for e in errors)) for name in errors[0]), key=lambda item: item[1])
            gradient = (name, error)
            if error > GRADIENT_TOLERANCE and not faults:  # gradients of wrong logits say nothing more
                wrong = [found.gradients or {} for found in seen.values()]
                faults.append(str(differences.first_gradient(errors, wrong, self.gradients)))
        unseen = ("images were not tried: only text was",) if self.sees and not self.has_image else ()
        return Verdict(verdict.size, tuple(faults), worst, loss, tokens, gradient, (*verdict.notes, *unseen))


def _worst(what: str, seen: dict[int, probe.Observation], whole: probe.Observation) -> float | None:
    """The largest relative error, over the ranks that have come so far, of their "logits" or "loss"."""
    found = [getattr(each, what) for each in seen.values()]
    return max((relative(value, getattr(whole, what)) for value in found if value is not None), default=None)


def _rank(folder: Path, reports: Path, deadline: float) -> int:
    """One rank: load, answer, and leave an Observation in `reports`; ends with 1 where something was raised."""
    with (folder / "request.pickle").open("rb") as file:
        sys.path[:] = pickle.load(file)
        cls, plan, own, grads, dtype = pickle.load(file)
    for name, strategy in own.items():
        STRATEGIES[name] = strategy
    questions, labels, expected = torch.load(folder / "questions.pt")
    seen, path = probe.Observation(), reports / f"{os.environ['RANK']}.pt"

    def report() -> None:
        torch.save(seen, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # whole or not at all: torchrun ends the ranks when one has failed

    def fail(failure: str) -> None:
        seen.failure = failure
        report()
        os._exit(1)  # without a word to the others, which may be in a collective

    late = threading.Timer(max(1.0, deadline - time.time()), fail, ["no end in time; do all ranks communicate alike?"])
    late.daemon = True
    late.start()
    try:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(TP_AXIS,))
        with enable():
            model = cls.from_pretrained(folder / "checkpoint", tp_plan=plan, device_mesh=mesh, dtype=dtype)
        with probe.computing_in(dtype):
            probe.observe(model, questions, seen, labels)
            if grads:
                seen.doing = "computing gradients"
                grown = probe.gradients(model, questions[0], labels)
        if grads:
            params = dict(model.named_parameters())
            whole = {
                name: full_tensor(params[name], grown.get(name, torch.zeros_like(params[name]))) for name in expected
            }
            seen.errors = gradient_errors(whole, expected)
            seen.gradients = {name: whole[name] for name in whole if seen.errors[name] > GRADIENT_TOLERANCE}
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")
    late.cancel()
    report()
    dist.destroy_process_group()
    return 0


def read_config(config: PretrainedConfig | str | Path) -> PretrainedConfig:
    """The config of a folder, a file or a name on the Hub. Raises UsageError where there is none."""
    if isinstance(config, PretrainedConfig):
        return config
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            describe(
                str(config),
                got=str(error).strip().splitlines()[0],
                expected="a config.json, a folder with one, or a name on the Hub",
                fix="See its path or name.",
            )
        ) from error
    return found


def _same(tokens: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return (tokens is None and expected is None) or (
        tokens is not None and expected is not None and torch.equal(tokens, expected)
    )


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
