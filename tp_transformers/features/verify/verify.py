"""Verification of a plan: a small random model of the architecture on N ranks, compared with one process.

The plan is first bound to the model in full size, without starting ranks. Then a small model with the same head counts,
experts and kinds of layers is written to a temporary folder. One process computes logits, greedy tokens and gradients
from it, and so do the ranks of every size, started by torchrun.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ...errors import PlanError, TensorParallelError, UnsupportedError, UsageError
from ...loading.choose_plan import planners, read_plan
from ...plans.bind import Resolution, resolve
from ...plans.rules import Plan
from ...plans.yaml_file import available_plans
from ...strategies import STRATEGIES
from ...strategies.registry import built_in
from ..command_line.models import model_class, own_class, read_config
from ..quantized.find import Quantization
from ..run.launch import torchrun
from .differences import CLOSE, EXACT, OUTPUT_TOLERANCE, Differences, Tolerance, relative
from .small_models import model as probe
from .small_models.config import meta_model, one_line, shrink, supported
from .small_models.inputs import untried
from .small_models.widths import NARROW, of_kernels

PlanLike = str | Path | dict[str, Any] | Plan

Launch = Callable[[Path, Path, int, float], int]
"""(folder of the verification, folder of reports, number of ranks, timeout in seconds) -> exit code of the ranks.

Their output goes to the file `output` in the folder of reports."""


@dataclass(frozen=True)
class Verdict:
    """Results on `size` ranks; None for numbers that were not computed."""

    size: int
    faults: tuple[str, ...] = ()
    """Errors, each with its module or rule."""
    logits: float | None = None
    """Largest relative error of the logits, over the ranks."""
    loss: float | None = None
    """Largest relative error of the loss, if the model takes labels; some labels are ignored."""
    tokens: bool | None = None
    """True if all greedy tokens equal those of one process."""
    gradient: tuple[str, float] | None = None
    """Parameter with the largest relative error of its gradient, and that error."""
    notes: tuple[str, ...] = ()
    """Limits of the verification, and modules that the plan replicates."""
    bits: tuple[str, ...] = ()
    """The dtypes in which bits were compared."""

    @property
    def ok(self) -> bool:
        """True if the ranks compute the same as one process."""
        return not self.faults


def verify(
    config: PretrainedConfig | str | Path,
    *,
    plan: PlanLike | None = None,
    sizes: Sequence[int] = (2,),
    shares: Sequence[float] | None = None,
    grads: bool = False,
    bits: bool = False,
    timeout: float = 600,
    allow_replicated: bool = False,
    seed: int = 0,
    launch: Launch | None = None,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """Compare tensor parallelism on `sizes` ranks with one process, on CPUs in fp64; returns a verdict for each size.

    Args:
        config: a config, the path of a config.json, a folder with one, or a name on the Hub; no weights are read.
        plan: as `tp_plan` of `from_pretrained`; None: "auto".
        sizes: numbers of ranks.
        shares: as `tp_shares` of `from_pretrained`; then their number takes the place of `sizes`.
        grads: True to compare gradients too.
        bits: True to make the plan invariant, as `tp_invariant` does, and ask for the bits of one process, in float32
            and bfloat16, on one thread a process.
        timeout: seconds for the ranks of one size.
        allow_replicated: as in `from_pretrained`.
        seed: of the small model's weights.
        launch: starts the ranks of a size, which call `run_rank`; None: torchrun.
        trust_remote_code: whether code of the repository may run.
        log: called with a line about each long step.

    Raises:
        UsageError: if there is no such config, or a size is not positive.
        PlanError: if the plan cannot be read, or there is none. A plan that does not fit the model is a fault instead.
        UnsupportedError: if transformers has no class for the config, if no small model of it can be made, run in one
            process, saved and loaded again, or if a load would reject the config's quantisation.
    """
    sizes = sizes if shares is None else (len(shares),)
    if not sizes or min(sizes) < 1:
        raise UsageError("sizes", got=str(list(sizes)), expected="numbers of 1 or more", fix="Give some.")
    where = {"trust_remote_code": trust_remote_code}
    config = copy.deepcopy(config) if isinstance(config, PretrainedConfig) else read_config(config, **where)
    quantization = Quantization.find(config, None)
    title = quantization.format.title if isinstance(quantization, Quantization) else None
    in_floats = None if title is None else f"without its {title}: a load shards quantised weights as others"
    own = own_class(config, **where)
    cls = own or model_class(config)
    small = shrink(config, own, sizes=of_kernels(max(sizes)) if bits else NARROW)
    true, model = meta_model(cls, config), meta_model(cls, small)
    chosen = _choose(plan, true, max(2, *sizes))
    chosen = chosen if shares is None else replace(chosen, shares=tuple(shares))
    chosen = chosen.with_options(invariant=bits, allow_replicated=allow_replicated)
    is_ours = not chosen.declared or config.model_type in available_plans()
    declared = None if is_ours else f"no plan of ours for {config.model_type}: this is {chosen.source}"
    notes = tuple(filter(None, (declared, in_floats)))
    verdicts = {size: _bind(chosen, true, size, notes) for size in dict.fromkeys(sizes)}
    resolutions = {size: _bind_small(chosen, model, size) for size, verdict in verdicts.items() if verdict.ok}
    if resolutions:
        request = _Request(cls, small, chosen, grads, EXACT if bits else CLOSE, timeout, seed)
        _prove(request, model, resolutions, verdicts, launch or with_torchrun, log)
    return [verdicts[size] for size in sizes]


def _choose(plan: PlanLike | None, model: PreTrainedModel, size: int) -> Plan:
    """The plan of a load of `model` with `tp_plan=plan`; a planner makes one for `size` ranks."""
    given = read_plan("auto" if plan is None else plan)
    if isinstance(given, str):
        return Plan.parse(planners()[given].make(model, size), source=f'tp_plan="{given}"')
    return given if isinstance(given, Plan) else given.make(model)


def _bind(plan: Plan, model: PreTrainedModel, size: int, notes: tuple[str, ...]) -> Verdict:
    """Verdict before ranks run: the faults of the plan, or else `notes` and the notes of the plan."""
    try:
        resolution = resolve(plan, model, size)
    except PlanError as error:
        return Verdict(size, (str(error),))
    return Verdict(size, notes=(*notes, *resolution.notes))


def _bind_small(plan: Plan, model: PreTrainedModel, size: int) -> Resolution:
    """Bind the plan to the small model. Raises UnsupportedError if it fits only the full model."""
    try:
        return resolve(plan.with_options(allow_replicated=True), model, size)
    except PlanError as error:
        got = f"a plan that fits the model, but not its small one: {error}"
        expected = "one whose parts and units are not lengths"
        fix = "Give parts by their number or by their heads."
        raise UnsupportedError(plan.source, got=got, expected=expected, fix=fix) from error


def with_torchrun(folder: Path, reports: Path, size: int, timeout: float) -> int:
    """Start the ranks with torchrun."""
    deadline = time.time() + 0.9 * timeout  # earlier for the ranks, so that they can report where they hang
    program = ["-m", "tp_transformers.features.verify.rank", str(folder), str(reports), str(deadline)]
    with (reports / "output").open("wb") as output:
        try:
            return torchrun(program, ranks=size, timeout=timeout, output=output)
        except subprocess.TimeoutExpired:
            output.seek(0, os.SEEK_END)
            output.write(f"\nThe ranks did not end in {timeout:g} s: a larger --timeout gives them more.\n".encode())
            return 1


@dataclass(frozen=True)
class _Request:
    """A class and its small config, and how results are compared."""

    cls: type[PreTrainedModel]
    config: PretrainedConfig
    plan: Plan
    grads: bool
    tolerance: Tolerance
    timeout: float
    seed: int


def _prove(
    request: _Request,
    model: PreTrainedModel,
    resolutions: dict[int, Resolution],
    verdicts: dict[int, Verdict],
    launch: Launch,
    log: Callable[[str], None],
) -> None:
    """Run the ranks of all sizes, and put their results into `verdicts`; if bits are compared, in two dtypes."""
    is_exact, count = request.tolerance.is_exact, sum(param.numel() for param in model.parameters())
    with tempfile.TemporaryDirectory(prefix="tp-verify-") as scratch:
        for dtypes in [(torch.float32,), (torch.bfloat16,)] if is_exact else [(torch.float64, torch.float32)]:
            log(f"one process computes with a small {request.config.model_type} of {count:,} parameters")
            proof = _Proof(Path(scratch, str(dtypes[0])), request, dtypes, launch)
            for size, resolution in resolutions.items():
                if verdicts[size].ok:
                    ranks = f"{size} ranks are" if size > 1 else "1 rank is"
                    log(f"{ranks} to compute the same" + f" bits in {proof.dtype_name}" * is_exact)
                    verdicts[size] = proof.run(model, resolution, verdicts[size])


class _Proof:
    """State of a verification: a small model in a folder, and the results of one process.

    They are computed in the first of `dtypes` that the operators of the model support.
    """

    def __init__(self, folder: Path, request: _Request, dtypes: Sequence[torch.dtype], launch: Launch) -> None:
        self.folder, self.request, self.launch = folder, request, launch
        folder.mkdir()
        threads = probe.on_threads(1 if request.tolerance.is_exact else None)
        with supported(f"a small {request.config.model_type}"), torch.random.fork_rng(devices=[]), threads:
            created = probe.make(request.cls, request.config, seed=request.seed)
            for self.dtype in dtypes:
                try:
                    questions = self._ask(request.cls, created)
                    break
                except Exception as error:
                    if isinstance(error, TensorParallelError) or self.dtype is dtypes[-1]:
                        raise
        torch.save((*questions, self.gradients), folder / "questions.pt")
        own = {name: strategy for name, strategy in STRATEGIES.items() if built_in().get(name) is not strategy}
        with (folder / "request.pickle").open("wb") as file:
            pickle.dump(sys.path, file)  # first: needed to unpickle the other objects
            pickle.dump((request.cls, request.plan, own, request.grads, self.dtype, request.tolerance), file)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _ask(self, cls: type[PreTrainedModel], created: PreTrainedModel) -> tuple[Any, Any]:
        """Compute the results of one process in `self.dtype`; returns the inputs and the labels."""
        *asked, _ = probe.questions(created)
        self.untried = untried(created, asked[0])
        questions = [probe.in_dtype(question, self.dtype) for question in asked]
        # Load it, as ranks do: conversions may give a loaded model another form than a new model.
        model = self._reloaded(cls, created, questions[0])
        self.reference = probe.Observation()
        with probe.computing_in(self.dtype):
            labels = probe.labels(model, questions[0])
            probe.observe(model, questions, self.reference, labels)
            if self.request.tolerance.is_exact:
                self.reference.further = probe.further_answers(model, questions[0])
            self.gradients = probe.gradients(model, questions[0], labels) if self.request.grads else {}
        return questions, labels

    def _reloaded(
        self, cls: type[PreTrainedModel], created: PreTrainedModel, question: dict[str, torch.Tensor]
    ) -> PreTrainedModel:
        """Save the model and load it in one process. Raises UnsupportedError if its logits then differ.

        In a dtype of 16 bits they may: a load keeps some parameters in float32.
        """
        subject = f"a small {created.config.model_type}"
        expected = "the same model"
        fix = (
            "This is transformers', not the plan's: report it there, and verify with a release that saves all weights."
        )
        try:
            created.float().save_pretrained(self.folder / "checkpoint")
            model: PreTrainedModel
            model, info = cls.from_pretrained(self.folder / "checkpoint", dtype=self.dtype, output_loading_info=True)
        except Exception as error:
            got = f"its checkpoint does not reload in one process: {one_line(error)}"
            raise UnsupportedError(subject, got=got, expected=expected, fix=fix) from error
        probe.convert(model, self.dtype)
        probe.convert(created, self.dtype)
        for name, param in created.named_parameters():  # from_pretrained may unfreeze parameters
            model.get_parameter(name).requires_grad_(param.requires_grad)
        if self.dtype.itemsize < 4:
            return model
        with torch.no_grad(), probe.computing_in(self.dtype):
            answers = [probe.answer(candidate, question) for candidate in (created, model)]
        worst = relative(answers[1], answers[0])
        if worst > OUTPUT_TOLERANCE:
            lost = sorted(info["missing_keys"])
            named = f"it has no {', '.join(lost[:3])}{' ...' * (len(lost) > 3)}" if lost else "no weight is missing"
            got = (
                f"its checkpoint does not reload in one process: other logits (relative error {worst:.1e}), and {named}"
            )
            raise UnsupportedError(subject, got=got, expected=expected, fix=fix)
        return model

    def run(self, model: PreTrainedModel, resolution: Resolution, verdict: Verdict) -> Verdict:
        """Run the ranks of one size, and judge their results; `verdict`: the verdict before."""
        size = verdict.size
        reports = self.folder / f"ranks-{size}"
        reports.mkdir()
        code = self.launch(self.folder, reports, size, self.request.timeout)
        # Sorted by the time when ranks ended: a failure may cause others.
        ended = sorted(reports.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
        seen: dict[int, probe.Observation] = {int(path.stem): torch.load(path, weights_only=False) for path in ended}
        if code and len(seen) < size and all(observation.failure is None for observation in seen.values()):
            printed = (reports / "output").read_text(errors="replace").strip().splitlines()[-20:]
            lost = "\n    ".join(
                [f"a rank ended, or hung, without a report; what was printed last ({code}):", *printed]
            )
            return replace(verdict, faults=(lost,))
        differences = Differences(model, resolution, size, self.reference.trace, self.request.tolerance)
        return self._judge(verdict, seen, differences)

    def _judge(self, verdict: Verdict, seen: dict[int, probe.Observation], differences: Differences) -> Verdict:
        """Compare the results of the ranks with those of one process."""
        faults, tolerance = [], self.request.tolerance
        failed = {rank: observation for rank, observation in seen.items() if observation.failure is not None}
        for rank, observation in list(failed.items())[:1]:  # the others fail as a consequence, or for the same reason
            inside = observation.trace.running[-1].name if observation.trace.running else None
            where = f" (in {inside}; {differences.rule(inside)}) {differences.made_from(inside)}" if inside else ""
            faults.append(f"rank {rank}, {observation.doing}: {observation.failure}{where}".strip())
        worst = _worst("logits", seen, self.reference)
        if worst is not None and worst > tolerance.output:
            faults.append(f"the logits differ (relative error {worst:.1e})")
        loss = _worst("loss", seen, self.reference)
        if loss is not None and loss > tolerance.output and not faults:  # the loss follows from the logits
            faults.append(f"the loss differs (relative error {loss:.1e}), though the logits agree")
        tokens = None
        if len(seen) == verdict.size and not failed:
            tokens = all(_same(observation.tokens, self.reference.tokens) for observation in seen.values())
            if not tokens:
                agree = ", though the logits of a full prompt agree: see what its caches hold" * (not faults)
                faults.append(f"the greedy tokens differ{agree}")
        further = [
            name
            for name, expected in self.reference.further.items()
            if any(not torch.equal(seen_by.further.get(name, expected), expected) for seen_by in seen.values())
        ]
        if further and not faults:
            faults.append(f"the logits of {', '.join(further[:4])}{' ...' * (len(further) > 4)} differ")
        if faults:
            first = differences.first_output({rank: observation.trace for rank, observation in seen.items()})
            faults[:0] = [first] if first is not None else []
        gradient = None
        errors = [observation.errors for observation in seen.values() if observation.errors]
        if errors:
            name, error = max(((name, max(e[name] for e in errors)) for name in errors[0]), key=lambda item: item[1])
            gradient = (name, error)
            if error > tolerance.gradient and not faults:  # wrong logits have wrong gradients
                wrong = [observation.gradients or {} for observation in seen.values()]
                faults.append(str(differences.first_gradient(errors, wrong, self.gradients)))
        names = {"image": "images", "audio": "sounds"}
        unseen = [f"{names[name]} were not tried: it took none of a usual shape" for name in self.untried]
        notes = tuple(dict.fromkeys((*verdict.notes, *unseen)))
        bits = (*verdict.bits, self.dtype_name) if tolerance.is_exact else ()
        return Verdict(verdict.size, tuple(faults), worst, loss, tokens, gradient, notes, bits)


def _worst(field: str, seen: dict[int, probe.Observation], reference: probe.Observation) -> float | None:
    """Largest relative error of "logits" or "loss" over the ranks that computed it."""
    values = [getattr(observation, field) for observation in seen.values()]
    return max((relative(value, getattr(reference, field)) for value in values if value is not None), default=None)


def _same(tokens: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return tokens is expected is None or (tokens is not None and expected is not None and torch.equal(tokens, expected))
