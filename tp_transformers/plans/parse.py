"""Plans as data: YAML -> what rules are made of, and every fault of the form.

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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import PlanError, describe, nearest
from ..strategies import TensorParallelLayer, as_strategy

BATCH_SHARDED_INPUT = "batch-sharded"
"""Layout, in a rule, of an input of which every rank has samples of its own."""

ATTENTION_ROLES = ("query", "key", "value", "key_value", "fused", "interleaved", "output", "with_query", "with_key")
"""Roles of an attention module's children; see the module's docstring."""

OPTIONS = ("sequence_parallel", "loss_parallel")
SECTIONS = (
    "model_type",
    "extends",
    "base_model",
    "optional",
    "heads",
    "rules",
    "attention",
    "batch_sharded",
    *OPTIONS,
)
IN_BASE_MODEL = ("base_model", "optional")


def read_plan_file(path: Path) -> Any:
    """The data of a plan's YAML file. Raises PlanError where it cannot be read, or is not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
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


def model_types_of(path: Path) -> tuple[str, ...]:
    """The model types that a plan's YAML file is for."""
    found = yaml.load(path.read_text(encoding="utf-8"), Loader=_SafeLoader)["model_type"]
    return (found,) if isinstance(found, str) else tuple(found)


def check_sections(data: Any, source: str) -> list[str]:
    """Faults of the sections of a plan. Raises PlanError where it has none, not being a mapping."""
    if not isinstance(data, Mapping):
        raise PlanError(
            describe(
                f"plan {source}",
                got=f"a {type(data).__name__}",
                expected=f"a mapping of {', '.join(SECTIONS)}",
                fix="See model_plans/llama.yaml for one.",
            )
        )
    return [
        f"unknown section {key!r}{nearest(str(key), SECTIONS)}; sections are {', '.join(SECTIONS)}"
        for key in data
        if key not in SECTIONS
    ]


def mapping_of(data: Mapping[str, Any], section: str, faults: list[str]) -> Mapping[Any, Any]:
    value = data.get(section) or {}
    if isinstance(value, Mapping):
        return value
    faults.append(f"section {section} is a {type(value).__name__}, not a mapping of names")
    return {}


def is_names(value: Any) -> bool:
    """True for a list of names."""
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def rule_arguments(pattern: str, value: Any, section: str, faults: list[str]) -> dict[str, Any] | None:
    """The arguments of `Rule` for a line of a section; None, and a fault, where there is no strategy."""
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
    return {
        "pattern": pattern,
        "strategy": as_strategy(strategy),
        "parts": parts,
        "unit": unit,
        "widths": (widths,) if isinstance(widths, str) else tuple(map(str, widths)),
        "batch_sharded": layout is not None,
        "optional": section in ("optional", "heads"),
        "in_base_model": section in IN_BASE_MODEL,
    }


def attention_arguments(pattern: str, children: Any, faults: list[str]) -> dict[str, Any]:
    """The arguments of `Attention` for a line of the section `attention`."""
    options = dict(children) if isinstance(children, Mapping) else {}
    optional = options.pop("optional", False)
    roles = {role: (names,) if isinstance(names, str) else tuple(names or ()) for role, names in options.items()}
    if not roles or not set(roles) <= set(ATTENTION_ROLES):
        faults.append(f"attention {pattern}: {children!r} does not map {', '.join(ATTENTION_ROLES)} to child names")
    return {"pattern": pattern, "children": roles, "optional": bool(optional), "in_base_model": True}


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
