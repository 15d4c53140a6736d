"""Plans: YAML or dict -> frozen rules, and which names of a model they match.

The YAML format, by example (`model_plans/llama.yaml` is a real one):

    model_type: phi3                    # config.model_type, or a list of them
    extends: llama                      # start from another plan; rules of the same name replace its own, null removes
    base_model:                         # names inside the base model, so that every head class matches
      layers.*.mlp.down_proj: rowwise   # `*` stands for a layer number; names match as a whole
      layers.*.mlp.gate_up_proj: {strategy: packed_colwise, parts: 2}
      layers.*.self_attn.qkv_proj: {strategy: packed_colwise, parts: [query, key, value]}
    optional:                           # the same, but a config may lack them
      layers.*.self_attn.q_norm: replicated_with_grad_allreduce
    heads:                              # names in the full model; skipped by classes that lack them
      lm_head: colwise_rep
    rules: {...}                        # names in the full model, all of which must match
    sequence_parallel: true             # cut activations between blocks along the sequence
    loss_parallel: true                 # leave logits cut where there are labels
    batch_sharded: true                 # ranks have batches of their own, which attention, MLPs and experts gather; or
                                        # a list of modules, named in the full model, that do
    attention:                          # modules, named as in base_model, whose projections are cut by whole heads
      layers.*.self_attn: {fused: qkv_proj, output: o_proj}   # or query, key, value and output

A rule may also say `unit`: indices that stay together (a pair of interleaved gate and up features; the experts' 8); and
`widths`: attributes of the module that are a width, of which its forward needs this rank's (DBRX's experts, which view
their parameters by it). With `input: batch-sharded` a module gathers the samples of ranks that have batches of their
own; a module in which other rules stand may say nothing else.

Roles in attention: `query`, `key`, `value`, `output`; `fused`, a projection to all queries, then all keys, then all
values; `interleaved`, one that goes KV group by KV group; `key_value`, one to a key and a value of every query head;
`with_query` and `with_key`, whatever has something for every query or KV head (norms, sinks, position biases). A role
names a child or a list: of a projection's, the first that the module has; of `with_query` and `with_key`, all it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import PlanError, describe, list_faults, nearest
from ..strategies import STRATEGIES, TensorParallelLayer, as_strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH_SHARDED_INPUT = "batch-sharded"
"""What a rule calls the layout of an input of which every rank has samples of its own."""

ATTENTION_ROLES = ("query", "key", "value", "key_value", "fused", "interleaved", "output", "with_query", "with_key")
"""What the children of an attention module can be; see the module's docstring."""


@dataclass(frozen=True)
class Pattern:
    """A name in a model, in which `*` stands for a layer number."""

    pattern: str
    in_base_model: bool = field(default=False, kw_only=True)
    """Whether the name counts from the base model rather than from the full one."""

    def full(self, base_model_prefix: str) -> str:
        """The pattern, counted from the full model."""
        return ".".join(filter(None, (base_model_prefix if self.in_base_model else "", self.pattern)))

    def match(self, names: Iterable[str], base_model_prefix: str) -> Iterator[str]:
        """The names that match as a whole."""
        expression = r"\d+".join(map(re.escape, self.full(base_model_prefix).split("*")))
        matches = re.compile(expression).fullmatch
        return (name for name in names if matches(name))


@dataclass(frozen=True)
class Rule(Pattern):
    """One line of a plan: the modules or parameters that match `pattern` are split by `strategy`."""

    strategy: str | ParallelStyle
    """A strategy's name, an object of one, or of a style of torch, which becomes a strategy."""
    parts: int | tuple[int | str, ...] | None = None
    """Of a fused projection: how many equal parts, their lengths, or the heads that they hold."""
    unit: int | None = None
    """Indices that stay together on a rank."""
    widths: tuple[str, ...] = ()
    """Attributes of the module that are a width, and that are this rank's part of it in its forward."""
    batch_sharded: bool = False
    """Whether every rank has samples of its own, which the module gathers."""
    optional: bool = False
    """Whether it may match nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", as_strategy(self.strategy))

    @property
    def strategy_name(self) -> str:
        """What the plan calls the strategy."""
        return self.strategy if isinstance(self.strategy, str) else repr(self.strategy)

    @property
    def instance(self) -> TensorParallelLayer | None:
        """The strategy itself; None where there is none of that name."""
        return STRATEGIES.get(self.strategy) if isinstance(self.strategy, str) else as_strategy(self.strategy)


@dataclass(frozen=True)
class Attention(Pattern):
    """The modules that match `pattern` attend with heads: their projections are cut by whole heads."""

    children: Mapping[str, tuple[str, ...]]
    """Role (one of ATTENTION_ROLES) -> names of child modules or parameters."""
    optional: bool = False
    """Whether it may match nothing."""


@dataclass(frozen=True)
class Plan:
    """How an architecture is split: its rules, parsed and frozen."""

    source: str
    """What error messages call it: a file, "tp_plan", ..."""
    rules: tuple[Rule, ...]
    attention: tuple[Attention, ...] = ()
    """Empty: attention is recognised by the names of its projections."""
    model_types: tuple[str, ...] = ()
    """The values of `config.model_type` that it is for; empty for any."""
    sequence_parallel: bool = False
    """Whether activations between blocks are cut along the sequence."""
    loss_parallel: bool = False
    """Whether logits stay cut along the vocabulary where a model is given labels."""
    batch_sharded: bool | tuple[str, ...] | None = None
    """The modules, named in the full model, that gather the samples of ranks which have batches of their own, beside
    those whose rules say so; True for all attention, MLPs and experts; False for none, whatever rules say."""
    declared: bool = field(default=False, compare=False)
    """Whether it is the plan that a transformers class declares, rather than one that was written for us."""

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any], *, source: str = "tp_plan") -> Plan:
        """A plan from {name in the full model: strategy}. Raises PlanError on malformed rules."""
        return cls.parse({"rules": dict(rules)}, source=source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """A plan from a YAML file. Raises PlanError where it cannot be read, is not YAML, or is malformed."""
        path = Path(path)
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
        except OSError as error:
            raise PlanError(
                describe(
                    f"plan {path}",
                    got=(error.strerror or str(error)).lower(),
                    expected="a YAML file",
                    fix='Correct the path, or pass tp_plan="auto".',
                )
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PlanError(f"plan {path} is not YAML: {error}") from error
        return cls.parse(data, source=str(path))

    @classmethod
    def parse(cls, data: Any, *, source: str) -> Plan:
        """A plan from data in the form of the YAML files. Raises PlanError with every fault of the form."""
        if not isinstance(data, Mapping):
            raise PlanError(
                describe(
                    f"plan {source}",
                    got=f"a {type(data).__name__}",
                    expected=f"a mapping of {', '.join(_SECTIONS)}",
                    fix="See model_plans/llama.yaml for one.",
                )
            )
        faults = [
            f"unknown section {key!r}{nearest(str(key), _SECTIONS)}; sections are {', '.join(_SECTIONS)}"
            for key in data
            if key not in _SECTIONS
        ]
        base = _extended(str(data["extends"]), source) if data.get("extends") else cls(source, ())
        rules: dict[tuple[bool, str], Rule | None] = {(rule.in_base_model, rule.pattern): rule for rule in base.rules}
        for section in ("base_model", "optional", "heads", "rules"):
            for pattern, value in _mapping(data, section, faults).items():
                # A rule of null takes the extended plan's rule away.
                rule = None if value is None else _parse_rule(str(pattern), value, section, faults)
                rules[section in _IN_BASE_MODEL, str(pattern)] = rule
        attention: dict[str, Attention | None] = {entry.pattern: entry for entry in base.attention}
        for pattern, children in _mapping(data, "attention", faults).items():
            entry = None if children is None else _parse_attention(str(pattern), children, faults)
            attention[str(pattern)] = entry
        options = {option: data.get(option, getattr(base, option)) for option in _OPTIONS}
        faults.extend(
            f"{name} is {value!r}, not true or false" for name, value in options.items() if not isinstance(value, bool)
        )
        batch = data.get("batch_sharded", base.batch_sharded)
        if not (batch is None or isinstance(batch, bool) or is_names(batch)):
            faults.append(f"batch_sharded is {batch!r}, not true, false, or a list of modules")
        model_types = data.get("model_type") or ()
        if not isinstance(model_types, str | list | tuple):
            faults.append(f"model_type is {model_types!r}, neither a name nor a list of names")
        if faults:
            raise PlanError(list_faults(f"plan {source} is malformed", faults))
        return cls(
            source,
            tuple(rule for rule in rules.values() if rule is not None),
            tuple(entry for entry in attention.values() if entry is not None),
            (model_types,) if isinstance(model_types, str) else tuple(map(str, model_types)),
            **options,
            batch_sharded=tuple(batch) if isinstance(batch, list | tuple) else batch,
        )

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Plan | None:
        """The plan for `model.config.model_type`: ours from `model_plans/`, else what its transformers class declares.

        None where there is neither.
        """
        path = available_plans().get(model.config.model_type)
        if path is not None:
            return cls.from_yaml(path)
        declared = getattr(model, "_tp_plan", None)
        if not declared:
            return None
        source = f"the plan that {type(model).__name__} declares"
        rules = tuple(Rule(pattern, strategy=strategy, optional=True) for pattern, strategy in declared.items())
        return cls(source, rules, declared=True)

    def as_dict(self, base_model_prefix: str = "") -> dict[str, str]:
        """{name in the full model: strategy name}, in the order of the plan."""
        return {rule.full(base_model_prefix): rule.strategy_name for rule in self.rules}


def available_plans() -> Mapping[str, Path]:
    """The plans that ship with the package: {model_type: YAML file}."""
    package = Path(__file__).parents[1]
    wheel, checkout = package / "model_plans", package.parent / "model_plans"
    return _plans_in(wheel if wheel.is_dir() else checkout)


@cache
def _plans_in(folder: Path) -> Mapping[str, Path]:
    plans: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml")):
        model_types = yaml.load(path.read_text(encoding="utf-8"), Loader=_SafeLoader)["model_type"]
        plans.update(dict.fromkeys([model_types] if isinstance(model_types, str) else model_types, path))
    return MappingProxyType(plans)


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML was built with it


class _UniqueKeyLoader(_SafeLoader):
    """A loader that refuses two rules of one name, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))


_OPTIONS = ("sequence_parallel", "loss_parallel")
_SECTIONS = (
    "model_type",
    "extends",
    "base_model",
    "optional",
    "heads",
    "rules",
    "attention",
    "batch_sharded",
    *_OPTIONS,
)
_IN_BASE_MODEL = ("base_model", "optional")

_extending: ContextVar[tuple[Path, ...]] = ContextVar("tp_transformers_extending", default=())
"""The files whose `extends:` are being followed."""


def _extended(name: str, source: str) -> Plan:
    """The plan that `extends: name` starts from: a file beside the plan, or a model type with a plan."""
    own = Path(source).resolve()
    path: Path | None = own.parent / (name if name.endswith(".yaml") else f"{name}.yaml")
    if path is None or not path.is_file():
        path = available_plans().get(name)
    if path is None:
        raise PlanError(f"plan {source} extends {name!r}, which is no plan{nearest(name, available_plans())}")
    chain = (*_extending.get(), own)
    if path.resolve() in chain:
        raise PlanError(f"plan {source} extends itself: {' -> '.join(step.name for step in (*chain, path))}")
    token = _extending.set(chain)
    try:
        return replace(Plan.from_yaml(path), source=source)
    finally:
        _extending.reset(token)


def _mapping(data: Mapping[str, Any], section: str, faults: list[str]) -> Mapping[Any, Any]:
    value = data.get(section) or {}
    if isinstance(value, Mapping):
        return value
    faults.append(f"section {section} is a {type(value).__name__}, not a mapping of names")
    return {}


def is_names(value: Any) -> bool:
    """Whether it is a list of names."""
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _parse_rule(pattern: str, value: Any, section: str, faults: list[str]) -> Rule | None:
    options = dict(value) if isinstance(value, Mapping) else {"strategy": value}
    layout = options.pop("input", None)
    if layout is not None:
        options.setdefault("strategy", "replicate")  # its inner rules cut
    if layout not in (None, BATCH_SHARDED_INPUT):
        faults.append(f"{pattern}: unknown layout {layout!r} of the input; the only one is {BATCH_SHARDED_INPUT}")
    if "strategy" not in options or set(options) - {"strategy", "parts", "unit", "widths"}:
        given = sorted(map(str, options))
        faults.append(
            f"{pattern}: a rule has `strategy` and perhaps `parts`, `unit`, `widths` and `input`, not {given}"
        )
        return None
    strategy, parts, unit = (options.get(name) for name in ("strategy", "parts", "unit"))
    widths = options.get("widths") or ()
    if isinstance(parts, list | tuple):
        parts = tuple(parts)
    elif parts is not None and not isinstance(parts, int):
        faults.append(f"{pattern}: parts is {parts!r}, neither a number nor a list")
    if unit is not None and not (isinstance(unit, int) and unit > 0):
        faults.append(f"{pattern}: unit is {unit!r}, not a positive number")
    if not isinstance(as_strategy(strategy), str | TensorParallelLayer):
        name = getattr(strategy, "__name__", None)
        found = f"the class {name} (an object is {name}())" if isinstance(strategy, type) else repr(strategy)
        faults.append(
            f"{pattern}: the strategy is {found}, neither a name nor a TensorParallelLayer or ParallelStyle object"
        )
        return None
    return Rule(
        pattern,
        as_strategy(strategy),
        parts,  # type: ignore[arg-type]
        unit,  # type: ignore[arg-type]
        (widths,) if isinstance(widths, str) else tuple(map(str, widths)),
        batch_sharded=layout is not None,
        optional=section in ("optional", "heads"),
        in_base_model=section in _IN_BASE_MODEL,
    )


def _parse_attention(pattern: str, children: Any, faults: list[str]) -> Attention:
    options = dict(children) if isinstance(children, Mapping) else {}
    optional = options.pop("optional", False)
    roles = {role: (names,) if isinstance(names, str) else tuple(names or ()) for role, names in options.items()}
    if not roles or not set(roles) <= set(ATTENTION_ROLES):
        faults.append(f"attention {pattern}: {children!r} does not map {', '.join(ATTENTION_ROLES)} to child names")
    return Attention(pattern, roles, bool(optional), in_base_model=True)
