"""A new kind of strategy, which cuts, sums and draws in its own way, wherever the built-in ones are used."""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.verify.distributed.conftest import changed, kept
from tests.support.adapters import shake
from tests.support.comparisons import assert_same_tensors, gradient_differences, relative
from tests.support.models import MASK, PROMPTS, load, logits_of
from tp_transformers.slices.layout import Ranks, Split
from tp_transformers.strategies import STRATEGIES, Signature, State, TensorParallelLayer
from tp_transformers.verify import verify

TOLERANCE = 1e-4  # fp32 sums in another order


class _Reversed(TensorParallelLayer):
    """Features in reversed order of the ranks."""

    def _split_length(self, length: int, ranks: Ranks, unit: int) -> Split:
        return Split(length, tuple(reversed(ranks.split(length, unit=unit).ranges)))


class Sum(torch.autograd.Function):
    """A sum over the ranks in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool) -> Tensor:
        ctx.group, ctx.forward = group, forward
        return _mean(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] if ctx.forward else _mean(grads[0], ctx.group)), None, None


def _mean(x: Tensor, group: Any) -> Tensor:
    """The sum, as the ranks' mean times their number."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).mean(0) * group.size()


class MakesFeatures(_Reversed):
    """Output features; in training, half of them are dropped, of a mask that every rank draws for all features."""

    signature = Signature(State.REPLICATED, State.FEATURES)
    drops = True

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        return 0

    @property
    def sharded_output(self) -> Split | None:
        return self.split_length(self.features, self.size)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound: Any = super().bind(module, size, **options)
        bound.features = module.out_features
        return bound  # type: ignore[no-any-return]

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
        return (Sum.apply(inputs[0], mesh.get_group(), False), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: Any) -> Any:
        if not module.training or not self.drops:
            return outputs
        ((start, stop),) = self.split_length(self.features, self.size).ranges[mesh.get_local_rank()]
        mask = torch.rand((*outputs.shape[:-1], self.features)) < 0.5
        return outputs * mask[..., start:stop]

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        of_b = copy.copy(self)
        of_b.drops = False
        return TensorParallelLayer(), of_b


class TakesFeatures(_Reversed):
    """Input features; the output is summed."""

    signature = Signature(State.FEATURES, State.REPLICATED, inside=(State.FEATURES, State.PARTIAL))

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        return 1 if ndim == 2 else None

    def after(self, module: nn.Module, outputs: Any, mesh: Any) -> Any:
        return Sum.apply(outputs, mesh.get_group(), True)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        return TakesFeatures(), TensorParallelLayer()


KINDS: dict[str, type[TensorParallelLayer]] = {"makes": MakesFeatures, "takes": TakesFeatures}
RULES = {f"layers.*.mlp.{name}_proj": kind for name, kind in {"gate": "makes", "up": "makes", "down": "takes"}.items()}


def live(folder: str, plan: str, scratch: str) -> list[float]:
    """Run on every rank; returns relative errors."""
    with kept():
        STRATEGIES.update(KINDS)
        return list(_live(folder, plan, scratch))


def _live(folder: str, plan: str, scratch: str) -> Iterator[float]:
    whole = AutoModelForCausalLM.from_pretrained(folder)
    expected = logits_of(whole)
    model: Any = load(folder, tp_plan=plan)
    on_parts: Any = load(folder, tp_plan=plan, tp_sequence_parallel=True)
    down = model.model.layers[0].mlp.down_proj
    assert local_width(down) < down.in_features

    # logits and gradients, also where the sequence is cut
    whole(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()
    for each in (model, on_parts):
        yield relative(logits_of(each), expected)
        each(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()
        yield from gradient_differences(each, whole).values()

    # what it draws: the same on all ranks, something else each time
    torch.manual_seed(5)
    model.train()
    drawn: Sequence[Tensor] = [logits_of(model), logits_of(model), torch.rand(3)]
    assert not torch.equal(drawn[0], drawn[1])
    for each in drawn:
        first = each.clone()
        dist.broadcast(first, 0)
        yield relative(each, first)
    model.eval()

    # files
    model.save_pretrained(scratch)
    dist.barrier()
    assert_same_tensors(folder, scratch)

    # adapters
    config = LoraConfig(r=3, target_modules=["up_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = []
    for each in (model, whole):
        torch.manual_seed(11)
        adapted.append(get_peft_model(each, copy.deepcopy(config)))
    shake(*adapted)
    yield relative(logits_of(adapted[0].eval()), logits_of(adapted[1].eval()))


def local_width(layer: Any) -> int:
    return int(tp_transformers.local_tensor(layer.weight).shape[1])


def test_a_new_kind_lives_as_the_others_do(pool, cases, tmp_path) -> None:
    plan = changed(tmp_path, "llama", RULES)
    for errors in pool.run(3, live, cases(8, 4).folder, os.fspath(plan), os.fspath(tmp_path / "saved")):
        assert max(errors) < TOLERANCE, errors


def test_a_new_kind_is_planned_and_proven(cases, tmp_path, in_pool, monkeypatch, printed) -> None:
    for name, kind in KINDS.items():
        monkeypatch.setitem(STRATEGIES, name, kind)
    folder, plan = cases(8, 4).folder, os.fspath(changed(tmp_path, "llama", RULES))
    planned = json.loads(printed("plan", folder, "--plan", plan, "--tp-size", "3", "--json").splitlines()[-1])
    down = next(each for each in planned["parameters"] if each["name"].endswith("layers.0.mlp.down_proj.weight"))
    assert (down["strategy"], down["dim"]) == ("takes", 1)
    assert down["ranges"] == [[[67, 100]], [[34, 67]], [[0, 34]]]
    (verdict,) = verify(folder, plan=plan, sizes=[3], grads=True)
    assert verdict.ok, verdict.faults
