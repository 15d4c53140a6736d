"""The plan of a load: the caller's own, the one for the architecture, or one that a feature makes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..anatomy.names import base_prefix
from ..errors import PlanError, nearest, shown
from ..logs import get_logger
from ..plans.catalogue import available_plans, plan_names
from ..plans.rules import Plan
from ..ranks.group import TensorParallelGroup
from ..seams import Planner, features

logger = get_logger(__name__)

_logged: set[str] = set()
"""Model types with a logged use of their declared plan."""


@dataclass(frozen=True)
class ChangedPlan:
    """The plan of "auto" with some of its rules replaced, by name."""

    rules: Mapping[str, Any]
    """{name in the full model: strategy}."""

    def plan(self, model: PreTrainedModel, *, quietly: bool) -> Plan:
        """The plan for `model`. Raises PlanError on malformed rules, or where there is no plan to change."""
        base, prefix = auto_plan(model, quietly=quietly), base_prefix(model)
        source = f"{base.source}, with rules of distributed_config"
        own = Plan.from_dict(self.rules, source=source).rules
        names = {rule.full(prefix) for rule in own}
        kept = (rule for rule in base.rules if rule.full(prefix) not in names)
        return replace(base, source=source, rules=(*kept, *own))


@dataclass(frozen=True)
class NamedPlan:
    """A plan that ships with the package, by its name."""

    path: Path

    def plan(self, model: PreTrainedModel, *, quietly: bool) -> Plan:
        """The plan for `model`, with those of the models inside it."""
        plan = Plan.for_model(model, self.path)
        assert plan is not None  # every file has rules
        return plan


def planners() -> Mapping[str, Planner]:
    """Ways to make a plan, by the value of `tp_plan`."""
    return {name: planner for feature in features().values() for name, planner in feature.planners().items()}


def read_plan(tp_plan: Any) -> Plan | ChangedPlan | NamedPlan | str:
    """Read the caller's plan. "auto", the name of a planner, a plan of this package by name, and changes to "auto" are
    resolved later, by `plan_for`. A file takes precedence over a name.

    Raises PlanError on anything else, and on a dict without rules.
    """
    if isinstance(tp_plan, Plan | ChangedPlan | NamedPlan):
        return tp_plan
    words = ("auto", *planners())
    if isinstance(tp_plan, str) and tp_plan in words:
        return tp_plan
    quoted = ", ".join(f'"{word}"' for word in words)
    if isinstance(tp_plan, Mapping) and tp_plan:
        return Plan.from_dict(tp_plan)
    if isinstance(tp_plan, str) and re.fullmatch(r"[\w-]+", tp_plan) and not os.path.isfile(tp_plan):
        names = plan_names()
        if tp_plan in names:
            return NamedPlan(names[tp_plan])
        hint = nearest(tp_plan, (*words, *names))
        raise PlanError(
            "tp_plan",
            got=f"{shown(tp_plan)}, no plan of that name and no such file{hint}",
            expected=f"{quoted}, a name that `tp-transformers plans` lists, or the path of a YAML file",
            fix='Correct it, or pass tp_plan="auto".',
        )
    if isinstance(tp_plan, str | os.PathLike):
        return Plan.from_yaml(os.fspath(tp_plan))
    raise PlanError(
        "tp_plan",
        got=shown(tp_plan),
        expected=f"{quoted}, a name of ours, a dict of names and strategies, a Plan, or the path of a YAML file",
        fix='Most models need tp_plan="auto".',
    )


def auto_plan(model: PreTrainedModel, *, quietly: bool = False) -> Plan:
    """The plan of `tp_plan="auto"` for `model`. Raises PlanError if there is none."""
    plan = Plan.for_model(model)
    model_type = model.config.model_type
    if plan is None:
        raise PlanError(
            'tp_plan="auto"',
            got=f"{type(model).__name__} ({model_type}), for which there is no plan, ours or transformers'",
            expected="an architecture that `tp-transformers plans` lists, or a class that declares a plan",
            fix=" ".join([*(planner.advice for planner in planners().values()), 'Pass your own: tp_plan="plan.yaml".']),
        )
    if model_type not in available_plans() and model_type not in _logged and not quietly:
        _logged.add(model_type)
        logger.warning("%s has no plan of ours; using %s", model_type, plan.source)
    return plan


def plan_for(model: PreTrainedModel, tp_plan: Plan | ChangedPlan | NamedPlan | str, group: TensorParallelGroup) -> Plan:
    """The plan for `model`, which is on the meta device, from the result of `read_plan`.

    Raises:
        PlanError: there is none.
        UnsupportedError: a planner can make none.
    """
    if isinstance(tp_plan, Plan):
        return tp_plan
    if isinstance(tp_plan, ChangedPlan | NamedPlan):
        return tp_plan.plan(model, quietly=group.rank > 0)
    if tp_plan == "auto":
        return auto_plan(model, quietly=group.rank > 0)
    # The first rank makes it: random numbers may decide, and all ranks have to shard identically.
    made = group.together(lambda: planners()[tp_plan].make(model, group.size) if group.rank == 0 else None)
    return Plan.parse(group.gather(made)[0], source=f'tp_plan="{tp_plan}" for {type(model).__name__}')
