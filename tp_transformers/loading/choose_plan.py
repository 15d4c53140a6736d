"""The plan of a load: the caller's, that of the architecture, or one that a feature makes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import PlanError, nearest, shown
from ..logs import get_logger, warn_once
from ..plans.rules import Plan
from ..plans.yaml_file import available_plans, plan_names
from ..ranks.group import TensorParallelGroup
from ..seams import Planner, features

logger = get_logger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """A plan that depends on the model."""

    make: Callable[[PreTrainedModel], Plan]
    """(model on the meta device) -> its plan. Raises PlanError if there is none."""


def planners() -> Mapping[str, Planner]:
    """Ways to make a plan, by the value of `tp_plan`."""
    return {name: planner for feature in features().values() for name, planner in feature.planners().items()}


def read_plan(tp_plan: Any) -> Plan | ModelPlan | str:
    """Read the caller's plan; `plan_for` resolves plans that depend on the model, and the name of a planner.

    A file takes precedence over a name.

    Raises PlanError on anything else, and on a dict without rules.
    """
    if isinstance(tp_plan, Plan | ModelPlan):
        return tp_plan
    if tp_plan == "auto":
        return ModelPlan(auto_plan)
    if isinstance(tp_plan, str) and tp_plan in planners():
        return tp_plan
    words = ("auto", *planners())
    quoted = ", ".join(f'"{word}"' for word in words)
    if isinstance(tp_plan, Mapping) and tp_plan:
        return Plan.from_dict(tp_plan)
    if isinstance(tp_plan, str) and re.fullmatch(r"[\w-]+", tp_plan) and not os.path.isfile(tp_plan):
        names = plan_names()
        if tp_plan in names:
            return ModelPlan(partial(auto_plan, path=names[tp_plan]))
        hint = nearest(tp_plan, (*words, *names))
        got = f"{shown(tp_plan)}, no plan of that name and no such file{hint}"
        expected = f"{quoted}, a name that `tp-transformers plans` lists, or the path of a YAML file"
        raise PlanError("tp_plan", got=got, expected=expected, fix='Correct it, or pass tp_plan="auto".')
    if isinstance(tp_plan, str | os.PathLike):
        return Plan.from_yaml(os.fspath(tp_plan))
    expected = f"{quoted}, a name of ours, a dict of names and strategies, a Plan, or the path of a YAML file"
    raise PlanError("tp_plan", got=shown(tp_plan), expected=expected, fix='Most models need tp_plan="auto".')


def auto_plan(model: PreTrainedModel, path: Path | None = None) -> Plan:
    """The plan of `tp_plan="auto"` for `model`, or the plan of this package in the file `path`.

    Raises PlanError if there is none.
    """
    plan = Plan.for_model(model, path)
    if plan is None:
        got = f"{type(model).__name__} ({model.config.model_type}), for which there is no plan, ours or transformers'"
        expected = "an architecture that `tp-transformers plans` lists, or a class that declares a plan"
        fix = " ".join([*(planner.advice for planner in planners().values()), 'Pass your own: tp_plan="plan.yaml".'])
        raise PlanError('tp_plan="auto"', got=got, expected=expected, fix=fix)
    return plan


def plan_for(model: PreTrainedModel, tp_plan: Plan | ModelPlan | str, group: TensorParallelGroup) -> Plan:
    """The plan for `model`, which is on the meta device, from the result of `read_plan`.

    Raises:
        PlanError: there is none.
        UnsupportedError: a planner can make none.
    """
    if isinstance(tp_plan, Plan):
        return tp_plan
    if isinstance(tp_plan, ModelPlan):
        plan, model_type = tp_plan.make(model), model.config.model_type
        if plan.declared and model_type not in available_plans() and group.rank == 0:
            warn_once(logger, f"{model_type} has no plan of ours; using {plan.source}")
        return plan
    # The first rank makes it: random numbers may decide, and all ranks have to shard identically.
    made = group.from_first(lambda: planners()[tp_plan].make(model, group.size))
    return Plan.parse(made, source=f'tp_plan="{tp_plan}" for {type(model).__name__}')
