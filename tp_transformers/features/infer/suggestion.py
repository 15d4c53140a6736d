"""Inference of a plan for an architecture without one: from a small model, checked and written as YAML.

Blocks that are not recognised, or that `resolve` rejects, are replicated; the plan has the reason as a comment.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
import yaml
from transformers import PretrainedConfig, PreTrainedModel

from ...anatomy import base_prefix, fold_layers, inner
from ...errors import PlanError, TensorParallelError
from ...logs import get_logger
from ...plans.bind import Resolution, resolve
from ...plans.rules import Plan
from ..command_line.models import generating_class
from ..refusals.fractions import shares
from ..verify.small_models import model as probe
from ..verify.small_models.config import meta_model, shrink, supported
from ..verify.verify import Verdict, verify
from .block import Block
from .blocks import find_blocks
from .reach import Flow, flow_of
from .rehearsal import misfit
from .seen import fold_lists

logger = get_logger(__name__)

WIDTH = 120

REHEARSED = {
    *("colwise", "rowwise", "packed_colwise", "packed_rowwise", "local_colwise"),
    *("sharded_norm", "replicated_with_grad_allreduce"),
}
"""Strategies of blocks that can run in one process with a rank's widths."""

Run = Callable[[PreTrainedModel], object]
"""Calls a model."""


@dataclass
class Suggestion:
    """A proposed plan, with reasons for replicated modules."""

    model: PreTrainedModel
    """The full model on the meta device."""
    blocks: list[Block]
    reasons: dict[str, str]
    """Folded name of a replicated module -> reason, unless it is obvious."""

    @property
    def replicated(self) -> dict[str, str]:
        """The reasons for modules that no block shards."""
        sharded = {name for block in self.blocks for name in block.rules}
        return {name: why for name, why in self.reasons.items() if name not in sharded}

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan.parse(self.data(), source="suggested")

    def without(self, block: Block, why: str) -> Suggestion:
        """Copy with one block replicated for the reason `why`."""
        reasons = {**self.reasons, **dict.fromkeys(block.rules, why)}
        return replace(self, blocks=[candidate for candidate in self.blocks if candidate is not block], reasons=reasons)

    def resolve(self, size: int, model: PreTrainedModel | None = None) -> Resolution:
        """Bind the plan. Raises PlanError if it does not fit."""
        return resolve(self.plan, model or self.model, size)

    def data(self) -> dict[str, Any]:
        """The plan in the form of the YAML files."""
        sections: dict[str, Any] = {"model_type": self.model.config.model_type, "base_model": {}, "heads": {}}
        for name, rule in self._rules().items():
            inside = self.relative(name)
            sections["heads" if inside is None else "base_model"][name if inside is None else inside] = rule
        for kind, section in (("attention", "attention"), ("mixer", "mixers")):
            blocks = [block for block in self.blocks if block.kind == kind]
            sections[section] = {self.relative(block.name): self._entry(block) for block in blocks}
        return {key: value for key, value in sections.items() if value}

    def _entry(self, block: Block) -> dict[str, Any]:
        """Entry of a block in YAML; optional if other modules of the same folded name lack its children."""
        named = [module for name, module in self.model.named_modules() if fold_lists(self.model, name) == block.name]
        output = next(iter(block.roles["output"]))
        optional = {} if all(inner(module, output) is not None for module in named) else {"optional": True}
        return {role: _alone(children) for role, children in block.roles.items()} | optional

    def text(self, verdict: str) -> str:
        """The plan as commented YAML; `verdict` is the result of its proof."""
        config = self.model.config
        module = type(config).__module__
        is_documented = module.startswith("transformers.models.")
        page = f": https://huggingface.co/docs/transformers/model_doc/{module.split('.')[-2]}" * is_documented
        header = (
            f"Suggested from what reaches what in a small random model of {type(self.model).__name__} (transformers "
            f"{transformers.__version__}, model_type {config.model_type}). {verdict}"
        )
        remarks = {name: why for block in self.blocks for name, why in block.remarks.items()}
        remarks = {name: f"inferred: {why}" for name, why in remarks.items()}
        remarks |= {name: f"replicated: {why}" for name, why in self.replicated.items()}
        by_name = {self.relative(name) or name: why for name, why in remarks.items()}
        lines = [f"# {config.model_type}{page}", *_comment(header)]
        for section, value in self.data().items():
            if isinstance(value, str):
                lines.append(f"{section}: {value}")
                continue
            lines += ["", f"{section}:"]
            previous = ""
            for name, rule in value.items():
                why = by_name.get(name, "") if section != "attention" else ""
                lines += _comment(why, indent=2) if why and why != previous else []
                previous = why
                lines += _line(name, rule)
        return "\n".join([*lines, ""])

    def report(self, size: int) -> list[str]:
        """Lines about sharded blocks, replicated modules with reasons, and each rank's share of the bytes."""
        config = self.model.config
        lines = [f"{config.model_type}, {type(self.model).__name__}, transformers {transformers.__version__}"]
        for block in self.blocks:
            names = [name.removeprefix(f"{block.name}.") for name in block.rules if name != block.name]
            lines.append(f"sharded     {block.kind:10} {block.name}{': ' * bool(block.name)}{', '.join(names)}")
        by_reason: dict[str, list[str]] = {}
        for name, why in self.replicated.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"replicated  {', '.join(names)}: {why}" for why, names in by_reason.items()]
        resolution = self.resolve(size)
        lines += [f"note        {note}" for note in resolution.notes]
        fractions = shares(self.model, resolution.layouts, size)
        return [*lines, f"ranks hold {', '.join(f'{share:.0%}' for share in fractions)} of the bytes"]

    def relative(self, name: str) -> str | None:
        """The name relative to the base model; None if it is outside."""
        prefix = base_prefix(self.model)
        if not prefix:
            return name
        return name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else None

    def suspects(self, message: str) -> list[Block]:
        """Sort the blocks by the position of their names in an error message, then by most remarks."""

        message = fold_layers(message)

        def rank(block: Block) -> tuple[int, int]:
            positions = [message.find(name) for name in self._spellings(block) if name in message]
            return min(positions, default=len(message)), -len(block.remarks)

        return sorted(self.blocks, key=rank)

    def _spellings(self, block: Block) -> set[str]:
        """Names of a block in error messages."""
        names = {block.name, *block.rules} - {""}
        return names | {inside for name in names if (inside := self.relative(name))}

    def _rules(self) -> dict[str, Any]:
        """The rule of every module with parameters, in the model's order."""
        sharded = {name: rule for block in self.blocks for name, rule in block.rules.items()}
        rules: dict[str, Any] = {}
        for name, module in self.model.named_modules():
            folded = fold_lists(self.model, name)
            own_params = [f"{folded}.{param}" for param, _ in module.named_parameters(recurse=False)]
            if name and (folded in sharded or (own_params and not set(own_params) <= sharded.keys())):
                rules[folded] = sharded.get(folded, "replicate")
            rules |= {param: sharded[param] for param in own_params if param in sharded}
        return {name: rule for name, rule in rules.items() if rule is not None}


def suggest(config: PretrainedConfig, *, size: int = 2, cls: type[PreTrainedModel] | None = None) -> Suggestion:
    """Infer a plan for the architecture of a config that fits its model on `size` ranks.

    Args:
        cls: class of the model, used only if it is not a class of transformers; otherwise the generating class of
            the config is used, which has all heads.

    Raises UnsupportedError if the config makes no model, or its small model does not run.
    """
    if cls is None or cls.__module__.startswith("transformers."):
        cls = generating_class(config)
    model = meta_model(cls, config)
    small, run, flow = _observe(config, cls)
    blocks, reasons = find_blocks(small, flow, model)
    suggestion = _replicate_rejected(_replicate_rejected(Suggestion(model, blocks, reasons), small, 2), model, size)
    return _rehearse(suggestion, small, run, size)


def infer(model: PreTrainedModel, size: int) -> dict[str, Any]:
    """Infer a plan for `model`, log it, and return it in the form of the YAML files."""
    size = max(2, size)
    suggestion = suggest(model.config, size=size, cls=type(model))
    logger.warning(
        "inferred; a forward of a small model ran with each rank's widths, and `tp-transformers suggest` proves more; "
        "the plan for %s",
        "\n  ".join(suggestion.report(size)),
    )
    return suggestion.data()


def _rehearse(suggestion: Suggestion, small: PreTrainedModel, run: Run, size: int) -> Suggestion:
    """Replicate attention and MLPs that do not run with a rank's widths, because of splits or views by fixed numbers.

    Blocks with other strategies than REHEARSED are not tried.
    """
    while True:
        tried = [block for block in suggestion.blocks if REHEARSED.issuperset(map(_strategy, block.rules.values()))]
        alone = replace(suggestion, blocks=tried)
        try:
            reason = misfit(small, run, alone.resolve(size, small), size) if tried else None
        except PlanError:  # the small model may not be divisible where the full one is
            return suggestion
        if reason is None:
            return suggestion
        suggestion = suggestion.without(alone.suspects(reason)[0], reason)


def _strategy(rule: Any) -> str:
    """The name of the strategy of a rule, as in YAML."""
    return str(rule["strategy"] if isinstance(rule, Mapping) else rule)


def _replicate_rejected(suggestion: Suggestion, model: PreTrainedModel, size: int) -> Suggestion:
    """Replicate blocks until `resolve` accepts the plan and finds the same head counts as the small model."""
    while True:
        try:
            resolution = suggestion.resolve(size, model)
        except PlanError as error:
            if not suggestion.blocks:
                raise
            suspect = suggestion.suspects(str(error))[0]
            lines = [line[4:] for line in str(error).splitlines()[1:]] or [str(error)]
            named = [line for line in lines if any(name in line for name in suggestion._spellings(suspect))]
            suggestion = suggestion.without(suspect, (named or lines)[0])
            continue
        by_name = {fold_lists(model, name): heads for name, heads in resolution.attention.items()}
        for block in suggestion.blocks if model is not suggestion.model else ():
            heads = by_name.get(block.name)
            if heads is not None and block.heads not in (None, (heads.query.length, heads.kv.length)):
                read = f"{heads.query.length} query and {heads.kv.length} KV heads"
                suggestion = suggestion.without(block, f"its config says {read}, it computes {block.heads}")
                break
        else:
            return suggestion


def _observe(config: PretrainedConfig, cls: type[PreTrainedModel]) -> tuple[PreTrainedModel, Run, Flow]:
    """Make a small random model of the architecture; returns it, a call of it or a copy, and its flow."""
    small = shrink(config, cls)
    for owner in (small, *(getattr(small, name, None) for name in small.sub_configs)):
        if hasattr(owner, "use_cache"):
            owner.use_cache = False
    small._attn_implementation = "eager"
    small._experts_implementation = "eager"
    with supported(f"a small {config.model_type}"), torch.random.fork_rng(devices=[]):
        model = probe.make(cls, small)
        question, *_ = probe.questions(model)
        return model, lambda target: target(**question), flow_of(model, lambda: model(**question))


def _comment(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, WIDTH - indent, initial_indent=" " * indent + "# ", subsequent_indent=" " * indent + "# "
    )


def _alone(value: Any) -> Any:
    """Replace lists with a single name by the name."""
    if isinstance(value, dict):
        return {key: _alone(item) for key, item in value.items()}
    return value[0] if len(value) == 1 and isinstance(value[0], str) else value


def _line(name: str, rule: Any) -> list[str]:
    """A rule as YAML, on two lines if it is too long for one."""
    if isinstance(rule, str):
        return [f"  {name}: {rule}"]
    value = yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=10 * WIDTH).strip()
    line = f"  {name}: {value}"
    return [line] if len(line) <= WIDTH else [f"  {name}:", f"    {value}"]


TRIES = 4
"""Number of tries, each with one block less, after a plan is found wrong; then everything is replicated."""


def prove(
    suggestion: Suggestion,
    config: PretrainedConfig,
    size: int,
    *,
    log: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> tuple[Suggestion, Verdict]:
    """Verify a suggestion; returns the suggestion that passes, and its verdict.

    Blocks that a verdict names are replicated one by one; after TRIES blocks, everything is.

    Args:
        log: called with a line about each step, and about every failed try.
        options: other arguments of `verify`.
    """
    for tried in range(TRIES + 1):
        try:
            verdict = verify(config, plan=suggestion.plan, sizes=(size,), grads=True, log=log, **options)[0]
        except TensorParallelError as error:
            if not suggestion.blocks:
                raise
            verdict = Verdict(size, (str(error),))
        if verdict.ok or not suggestion.blocks:
            break
        fault = verdict.faults[0].splitlines()[0]
        for suspect in suggestion.suspects("\n".join(verdict.faults))[: 1 if tried < TRIES - 1 else None]:
            log(f"{suspect.kind} {suspect.name} stays replicated: {fault}")
            suggestion = suggestion.without(suspect, f"verify found it wrong when sharded: {fault}")
    return suggestion, verdict
