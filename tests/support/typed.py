"""Types of tensors on the `tp` axis, by values: what depends on a rank's shards varies, all else is replicated.

A small model runs as each rank in turn, forward and backward, on torch's `fake` backend. A collective returns noise
that is the same on all ranks, whatever goes in; so a tensor is replicated if and only if all ranks have its bits. Then
the last rank runs once more with shards of zeros: it must add nothing to any sum. The rules:

    a sum or a gather takes what varies            else it sums what is the same: a sum too many
    a rank with shards of zeros adds zeros         else it adds what is no part of its shards: a bias, twice
    where a step is the identity or a slice        its input is replicated: else a sum is missing
    gradients of replicated parameters             are replicated, those of shards vary; ranks with one slice agree
    outputs of the model, and of its modules whose strategies say so, are replicated

`python -m tests.support.typed` checks every type of tests/data/proofs.json and writes tests/data/types.json (`make
typed`); names of types check these alone.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from tests.support import proofs
from tests.support.pool import forget_meshes
from tp_transformers import local_tensor
from tp_transformers.errors import PlanError
from tp_transformers.features.command_line.models import known_class, model_class
from tp_transformers.features.verify.small_models import model as probe
from tp_transformers.features.verify.small_models.config import shrink
from tp_transformers.loading.load import partition_initialized
from tp_transformers.model.parallelize import parallelize
from tp_transformers.plans import Plan
from tp_transformers.ranks import collectives, direct
from tp_transformers.ranks.group import TensorParallelGroup
from tp_transformers.strategies import finish_gradient
from tp_transformers.strategies.forward import block
from tp_transformers.strategies.signature import REPLICATED

FILE = Path(__file__).parents[1] / "data" / "types.json"
SIZES = (2, 3, 5)
TAKES_REPLICATED = {(collectives.same, collectives._sum), (collectives._own, collectives.all_gather_uneven)}
"""Pairs of a forward and a backward whose forward is the identity or a slice of what is replicated."""
GETS_REPLICATED = {(backward, forward) for forward, backward in TAKES_REPLICATED}
"""Pairs whose backward is."""


class Trace:
    """What one rank made of a model: for each site, in order, the tensors whose types have rules."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name or "the model" for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.seen: list[tuple[str, str, Tensor]] = []
        """(rule, site, tensor)."""

    @property
    def site(self) -> str:
        """The innermost module whose forward runs."""
        return self.stack[-1] if self.stack else "a backward"

    def note(self, rule: str, x: Tensor, site: str | None = None) -> None:
        self.seen.append((rule, site or self.site, x.detach().clone()))

    def noise(self, like: Tensor) -> Tensor:
        """The result of a collective: the same on all ranks at the same place of the trace; positive, as squares."""
        generator = torch.Generator().manual_seed(len(self.seen))
        return torch.rand(like.shape, generator=generator).to(like.dtype) + 0.5

    def apply(self, original: Any, function: Any) -> Any:
        """`function.apply` as `original(function)` is, with notes."""

        def applied(*args: Any) -> Any:
            site, pair, results = self.site, args[1:3], original(function)(*args)
            if pair in TAKES_REPLICATED:
                self.note("input", args[0])
            result = results[0] if isinstance(results, tuple) else results
            if result is None or result.grad_fn is None:
                return results

            def enter(grads: tuple[Tensor, ...]) -> None:
                if pair in GETS_REPLICATED:
                    self.note("gradient", grads[0], site)
                self.stack.append(site)  # of the forward

            def leave(*_: Any) -> None:
                self.stack.pop()

            result.grad_fn.register_prehook(enter)
            result.grad_fn.register_hook(leave)
            return results

        return applied


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Let collectives return noise, and note what they take."""

    def all_reduce(x: Tensor, group: Any, op: Any = direct.SUM) -> None:
        if x.is_floating_point():
            trace.note("sum" if op == direct.SUM else "maximum", x)
            x.copy_(trace.noise(x))

    def all_reduced(x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        all_reduce(total, group)
        return total

    def all_gather(x: Tensor, group: Any) -> Tensor:
        out = x.repeat(group.size(), *[1] * (x.ndim - 1))
        if not x.is_floating_point():
            return out
        trace.note("gather", x)
        return trace.noise(out)

    def reduce_scatter(x: Tensor, group: Any) -> Tensor:
        trace.note("sum", x)
        own: Tensor = trace.noise(x[: len(x) // group.size()]) * (1 + group.rank())
        return own

    def padded(x: Tensor, length: int, dim: int) -> Tensor:
        shape = [*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]]
        return torch.cat([x, x.new_zeros(shape)], dim)

    def push(module: nn.Module, _: Any) -> None:
        trace.stack.append(trace.names.get(module, type(module).__name__))

    def pop(module: nn.Module, _: Any, output: Any) -> None:
        first, strategy = output[0] if isinstance(output, tuple) else output, vars(module).get("tp_strategy")
        if strategy is not None and strategy.signature.leaves is REPLICATED and isinstance(first, Tensor):
            trace.note("output", first)
        trace.stack.pop()

    apply, hooks = collectives.apply_directly, nn.modules.module
    replaced = {"all_reduce": all_reduce, "all_reduced": all_reduced, "all_gather": all_gather}
    with ExitStack() as stack:
        for name, function in {**replaced, "reduce_scatter": reduce_scatter, "broadcast": lambda *_: None}.items():
            stack.enter_context(patch.object(direct, name, function))
        stack.enter_context(patch.object(direct, "is_watched", lambda: 1))  # no sum in place
        stack.enter_context(patch.object(collectives, "_padded", padded))  # not with any values
        for module in (collectives, block):
            stack.enter_context(patch.object(module, "apply_directly", lambda function: trace.apply(apply, function)))
        for handle in (
            hooks.register_module_forward_pre_hook(push),
            hooks.register_module_forward_hook(pop, always_call=True),
        ):
            stack.callback(handle.remove)
        yield


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[TensorParallelGroup]:
    """A rank on torch's `fake` backend."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        with patch.object(TensorParallelGroup, "_gather", lambda self, value: [value] * self.size):
            yield TensorParallelGroup(mesh, rank, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        forget_meshes()


def run_as(
    rank: int, size: int, model: PreTrainedModel, plan: Plan, question: dict[str, Any], *, zeros: bool
) -> list[tuple[str, str, Tensor]]:
    """Run a copy of the unsharded `model` as one rank; with `zeros`, that rank holds shards of zeros."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)  # VibeVoice adds noise in its forward
    with rank_of(rank, size) as group:
        params = dict(model.named_parameters(remove_duplicate=False))
        resolution = parallelize(model, plan.with_options(allow_replicated=True), group)
        for name, param in params.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._parameters[own] = param
        trace = Trace(model)
        with traced(trace):
            partition_initialized(model, resolution, group)
            if zeros:
                for param in model.parameters():
                    if param.tp_shard.layout is not None:  # type: ignore[attr-defined]
                        local_tensor(param).zero_()
            output = probe.answer(model, question)
            trace.stack.clear()
            trace.note("output", output, "the model")
            weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            (output * weights).sum().backward()
            for name, param in model.named_parameters():
                shard, grad = param.tp_shard, finish_gradient(param)  # type: ignore[attr-defined]
                if grad is None:
                    continue
                grad = local_tensor(grad)
                shared = () if shard.layout is None else shard.layout.split.shared(rank)
                common = sum(part.length for part in shared if len(part.ranks) == size)
                if shard.layout is None or 0 < common == grad.shape[shard.layout.dim]:  # the only KV head, on all ranks
                    trace.note("replicated parameter", grad, name)
                    continue
                trace.note("shard", grad, name)
                for part in shared:
                    own_part = grad.narrow(shard.layout.dim, part.local, part.length)
                    trace.note(f"shared {part.slot}", own_part, name)
        return trace.seen


def _adds_without_shard(module: nn.Module) -> bool:
    """A LayerNorm sums squares of what is left of zeros without the mean; identity experts have no parameters."""
    return isinstance(module, nn.LayerNorm) or hasattr(module, "identity_expert")


def faults(model: PreTrainedModel, plan: Plan, size: int, question: dict[str, Any]) -> list[str]:
    """What breaks the rules, each with its module or parameter, in the order of the forward and backward."""
    ranks = [run_as(rank, size, model, plan, question, zeros=False) for rank in range(size)]
    empty = run_as(size - 1, size, model, plan, question, zeros=True)
    steps = [[seen for seen in trace if not seen[0].startswith("shared")] for trace in ranks]
    sites = [[seen[:2] for seen in trace] for trace in steps]
    if any(other != sites[0] for other in sites):
        first = next((seen for seen in zip(*sites, strict=False) if len(set(seen)) > 1), [("", "the end")])
        return [f"{first[0][1]}: ranks differ in what they do: {sorted({' in '.join(site) for site in first})}"]
    found = []
    for (rule, site, x), *others in zip(*steps, strict=True):
        same = all(torch.equal(x, other) for _, _, other in others)
        if not all(bool(other.isfinite().all()) for _, _, other in [(rule, site, x), *others]):
            found.append(f"{site}: {rule} is not finite")
        elif same and x.any() and rule in ("sum", "gather", "shard"):
            found.append(f"{site}: {rule} of what is replicated")
        elif not same and rule in ("gradient", "input", "output", "replicated parameter"):
            found.append(f"{site}: {rule} varies")
    shared: dict[tuple[str, str], Tensor] = {}
    for rule, site, x in (seen for trace in ranks for seen in trace if seen[0].startswith("shared")):
        if not torch.equal(shared.setdefault((rule, site), x), x):
            found.append(f"{site}: ranks with one slice have other gradients")
    for rule, site, x in empty:
        if rule == "sum" and x.any() and not _adds_without_shard(model.get_submodule(site)):
            found.append(f"{site}: a rank without a shard adds to a sum")
    return list(dict.fromkeys(found))


def tower_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a tower that no Auto class knows, from its module; None if there is one that an Auto class knows."""
    if known_class(config) is not None:
        return None
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    classes: list[type[PreTrainedModel]] = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)
    ]
    classes = [cls for cls in classes if cls.config_class is type(config) and "forward" in vars(cls)]
    return next((cls for cls in classes if cls.can_generate()), classes[-1] if classes else None)


def states(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of a forward that takes states in place of tokens: those of a Q-Former; {} for others."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    if "query_embeds" not in takes or "input_ids" in takes:
        return {}
    found = {"query_embeds": torch.randn(2, 5, config.hidden_size)}
    if "encoder_hidden_states" in takes:
        found["encoder_hidden_states"] = torch.randn(2, 6, config.encoder_hidden_size)
    return found


def small_model(config: PretrainedConfig) -> tuple[PreTrainedModel, dict[str, Any], Plan | None]:
    """(small random model, arguments of its forward, its plan)."""
    tower = tower_class(config)
    small = shrink(copy.deepcopy(config), tower)
    model = probe.make(tower or model_class(small), small).eval()
    question: dict[str, Any] = states(model) or probe.questions(model)[0]
    if "use_cache" in inspect.signature(model.forward).parameters:  # some models overwrite its states in place
        question = {**question, "use_cache": False}
    return model, question, Plan.for_model(model)


def check(model_type: str, kinds: Sequence[str], sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """What is found of a model type: faults by number of ranks, or why its plan is refused, or why it has no types."""
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**proofs.NEEDED.get(model_type, {}))
        if list(kinds) == ["masked text"]:
            config.architectures = [proofs.KINDS["masked text"][model_type]]
        model, question, plan = small_model(config)
        if plan is None:
            return {"refused": "no plan"}
        return {"faults": {str(size): faults(model, plan, size, question) for size in sizes}}
    except PlanError as error:
        return {"refused": proofs.shortened(str(error))}
    except Exception as error:
        return {"untyped": proofs.shortened(f"{type(error).__name__}: {error}")}


def summary(found: dict[str, Any]) -> str:
    """A word for what is found of a type."""
    return ("wrong" if any(found["faults"].values()) else "right") if "faults" in found else next(iter(found))


def known() -> dict[str, Any]:
    """What is known, by type."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    names = parser.parse_args().types
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    every, found, first = proofs.types(), known(), time.process_time()
    for model_type in names or [name for name in every if name not in found]:
        began = time.process_time()
        found[model_type] = check(model_type, every[model_type])
        print(model_type, found[model_type], f"{time.process_time() - began:.1f} s", flush=True)
        if not names:
            lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(found.items()))
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(Counter(summary(value) for value in found.values()), f"{time.process_time() - first:.0f} s")


if __name__ == "__main__":
    main()
