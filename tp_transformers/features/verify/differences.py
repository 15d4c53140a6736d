"""Search for the first module with an output that differs from one process, and its rule in the plan.

The strategy of a module decides how its output is compared with the full output: as this rank's slice if features stay
sharded, as a partial sum if a module around it sums. Modules without such a strategy may return the full output, or a
slice by any split of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ...anatomy import KV_COUNTS, QUERY_COUNTS, base_prefix, fold_layers, names_around
from ...plans.bind import Resolution
from ...plans.binding import summing_blocks
from ...plans.rule import UNRULED, Rule
from ...slices.layout import Layout, Split
from ...strategies import TensorParallelLayer, take
from ...strategies.signature import FEATURES, PARTIAL, REPLICATED
from .small_models.trace import Call, Trace

# For models that cannot compute in fp64: fp32 sums depend on their order. The tests of architectures use the same.
OUTPUT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
NOISE = 1e-6
"""Gradients below this fraction of the model's largest gradient are noise around zero (key biases without rotation)."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors, and the fraction of the largest gradient below which gradients are noise."""

    output: float = OUTPUT_TOLERANCE
    gradient: float = GRADIENT_TOLERANCE
    noise: float = NOISE

    @property
    def is_exact(self) -> bool:
        """True if bits have to be equal."""
        return self.output == 0


CLOSE, EXACT = Tolerance(), Tolerance(0.0, 0.0, 0.0)


def relative(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest magnitude of the reference; infinite for other shapes and for NaN."""
    if value.shape != reference.shape or not value.isfinite().all():
        return float("inf")
    if not value.numel():
        return 0.0
    # A division of Python's floats: in the tensors' dtype a small difference over a large magnitude may be 0.
    return (value - reference).abs().max().item() / max(reference.abs().max().item(), 1e-12)


def gradient_errors(
    seen: Mapping[str, Tensor], expected: Mapping[str, Tensor], noise: float = NOISE
) -> dict[str, float]:
    """Relative errors of gradients; a gradient that is noise around zero is compared with the largest gradient."""
    largest = max((grad.abs().max().item() for grad in expected.values()), default=1.0)
    errors = {}
    for name, grad in expected.items():
        if name not in seen:
            errors[name] = float("inf")
        elif grad.abs().max().item() < noise * largest:
            errors[name] = seen[name].abs().max().item() / largest
        else:
            errors[name] = relative(seen[name], grad)
    return errors


class Differences:
    """Comparison of one process with `size` ranks that loaded `model` with a plan.

    Args:
        model: the unsharded model on the meta device.
        resolution: the plan bound to `model`, after it was rewritten for its options.
        reference: inputs and outputs of modules in one process.
        tolerance: EXACT to search for different bits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        resolution: Resolution,
        size: int,
        reference: Trace,
        tolerance: Tolerance = CLOSE,
    ) -> None:
        self.resolution, self.size, self.reference, self.tolerance = resolution, size, reference, tolerance
        self.prefix = base_prefix(model)
        self.parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.has_children = {name for name, module in model.named_modules() if next(module.children(), None)}
        self.sums = summing_blocks(resolution.module_strategies, dict(model.named_modules()))

    def first_output(self, traces: Mapping[int, Trace]) -> str | None:
        """The first module with an output that differs on some rank, with its rule and a hint; None if none does."""
        calls = {rank: _numbered(trace) for rank, trace in traces.items()}
        for (name, count), reference in _numbered(self.reference).items():
            by_rank = {rank: numbered[name, count] for rank, numbered in calls.items() if (name, count) in numbered}
            for index, expected in enumerate(reference.returned):
                outputs = {r: call.returned[index] for r, call in by_rank.items() if len(call.returned) > index}
                errors = [(self._error(name, expected, output, r, outputs), r) for r, output in outputs.items()]
                error, rank = max(errors, default=(0.0, 0))
                if error > self.tolerance.output:
                    return self._blame(name, reference, by_rank, index, error, rank)
        return None

    def _blame(self, name: str, reference: Call, calls: Mapping[int, Call], index: int, error: float, rank: int) -> str:
        """The message about the first module with a different output; its input may already differ."""
        side, hint = (
            "output",
            self._hint(name, reference.returned[index], {r: c.returned[index] for r, c in calls.items()}),
        )
        strategy = self.resolution.module_strategies.get(name, UNRULED)
        split = strategy.sharded_input
        if split is not None and reference.given is not None:
            expected = {rank: self._slice(reference.given, split, rank) for rank in calls}
            input_errors = [
                (relative(call.given, expected[r]), r) for r, call in calls.items() if call.given is not None
            ]
            if max(input_errors, default=(0.0, 0))[0] > self.tolerance.output:
                (error, rank), side, hint = max(input_errors), "input", ""
        if side == "input" or strategy is UNRULED:
            hint = self.made_from(name) or hint
        if self.tolerance.is_exact:
            hint = self._why_bits_differ(strategy)
        return (
            f"{name or 'the model'}: its {side} is the first that differs (relative error {error:.1e}, rank {rank}); "
            f"{self.rule(name)}. {hint}"
        )

    def _why_bits_differ(self, strategy: TensorParallelLayer) -> str:
        """A hint about a module with a different output or gradient, after modules with the bits of one process."""
        if strategy.signature.sums and not strategy.keeps_order:
            return "Its strategy sums over the ranks, in another order than one process."
        kind = type(strategy)
        is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        own = "" if is_ours else f", or its strategy, {kind.__name__}, computes something else"
        return (
            "All that it computes from has the bits of one process, and no sum of it is split over ranks: a kernel of "
            f"this machine has results that depend on the number of columns, or of heads{own}."
        )

    def made_from(self, name: str) -> str:
        """A hint with the modules of the same block that make the input features of a module; "" if there are none.

        Of attention: where its forward may find the heads of a rank.
        """
        if name in self.resolution.attention:
            return (
                f"Its forward finds a rank's heads in {QUERY_COUNTS[0]} and {KV_COUNTS[0]}, or by -1 in a view. If it "
                "reads another name, rename that, or add `gathered: true` to its entry: all heads on each rank."
            )
        block, strategies = name.rpartition(".")[0], self.resolution.module_strategies
        own = strategies.get(name)
        if own is not None and own.signature.takes is not FEATURES:
            return ""
        makers = [peer for peer, strategy in strategies.items() if strategy.signature.leaves is FEATURES]
        makers = [peer for peer in makers if peer.rpartition(".")[0] == block and peer != name]
        if not makers:
            return ""
        return (
            f"It computes on what a rank has of {', '.join(map(self._short, makers))}. Are these the right features? "
            "Fused parts are packed_colwise, in the order in which they are stored, and heads are sharded by a plan's "
            "attention."
        )

    def first_gradient(
        self,
        errors: Sequence[Mapping[str, float]],
        wrong: Sequence[Mapping[str, Tensor]],
        expected: Mapping[str, Tensor],
    ) -> str | None:
        """The message about the first parameter, in backward order, with a different gradient; None if there is none.

        Args:
            errors: relative errors of every rank, by parameter.
            wrong: different gradients of every rank.
            expected: gradients of one process.
        """
        worst = {name: max(error[name] for error in errors) for name in errors[0]}
        order = {call.name: position for position, call in enumerate(self.reference.calls)}
        faults = sorted(
            (name for name, error in worst.items() if error > self.tolerance.gradient),
            key=lambda name: order.get(name.rpartition(".")[0], -1),
            reverse=True,
        )
        if not faults:
            return None
        name = faults[0]
        names = sorted({fold_layers(fault) for fault in faults} - {fold_layers(name)})
        also_wrong = f" Also wrong: {', '.join(names[:6])}{' ...' * (len(names) > 6)}." if names else ""
        gradients = [rank[name] for rank in wrong if name in rank]
        fed = ", ".join(map(self._short, self._fed_by(order.get(name.rpartition(".")[0], -1)))) or "nothing sharded"
        hint = f"What comes after it has the right gradients; see its rule, and those of what it feeds: {fed}."
        if len(gradients) == self.size and _close(sum(gradients[1:], gradients[0]), expected[name]):
            hint = (
                "Each rank has a partial sum of it. If it computes on sharded features, it is "
                f"replicated_with_grad_allreduce; if not, what it feeds does not sum its input's gradient: {fed}."
            )
        elif self.tolerance.is_exact:
            hint = self._why_bits_differ(self.resolution.module_strategies.get(name.rpartition(".")[0], UNRULED))
        elif gradients and _close(gradients[0], expected[name] * self.size):
            hint = f"It is counted {self.size} times, once a rank: its input is replicated, and its rule is replicate."
        return (
            f"{name}: its gradient is the first that differs (relative error {worst[name]:.1e}); "
            f"{self.rule(name)}. {hint}{also_wrong}"
        )

    def _fed_by(self, position: int) -> list[str]:
        """Modules after a position in the forward that leave features sharded, up to the next module that sums."""
        fed = []
        for call in self.reference.calls[position + 1 :]:
            strategy = self.resolution.module_strategies.get(call.name, UNRULED)
            if strategy.signature.leaves is FEATURES:
                fed.append(call.name)
            elif strategy.signature.takes is FEATURES or strategy.signature.sums:
                break
        return fed

    def _short(self, name: str) -> str:
        return f"{name.rpartition('.')[2]} ({self.rule(name)})"

    def rule(self, name: str) -> str:
        """Describe the rule of a module or parameter: its own, its module's, or those of its parameters."""
        owner = name.rpartition(".")[0]
        about = [name, *(known for known in self.parameters if known.rpartition(".")[0] == name)]
        if name in self.parameters:
            about.append(owner)
        rules = [rule for rule in self.resolution.plan.rules if any(rule.match(about, self.prefix))]
        if rules:
            described = ", ".join(f"{rule.full(self.prefix)}: {_drawn(rule)}" for rule in rules)
            return f"its rule{'s' * (len(rules) > 1)}: {described}"
        if name in self.resolution.attention:
            return "the plan's attention shards its heads"
        block = next((block for block in names_around(owner) if block in self.sums), None)
        return "no rule names it" + (f", but {fold_layers(block)}, around it, sums its output" if block else "")

    def _error(self, name: str, expected: Tensor, output: Tensor, rank: int, outputs: Mapping[int, Tensor]) -> float:
        """Relative error of one rank's output; 0 if the expected output is unknown."""
        strategy = self.resolution.module_strategies.get(name, UNRULED)
        inside = any(block in self.sums for block in names_around(name.rpartition(".")[0]))
        if strategy.sharded_output is not None:
            return relative(output, self._slice(expected, strategy.sharded_output, rank))
        if inside or strategy.signature.leaves is PARTIAL:
            values = list(outputs.values())
            if len(values) == self.size and all(value.shape == expected.shape for value in values):
                summed = sum(values[1:], values[0])
                return min(relative(summed, expected), relative(output, expected))
            return 0.0 if output.shape == expected.shape else self._sliced_error(expected, output, rank)
        if output.shape == expected.shape or strategy.signature.leaves is REPLICATED:
            return relative(output, expected)
        return self._sliced_error(expected, output, rank)

    def _sliced_error(self, expected: Tensor, output: Tensor, rank: int) -> float:
        """Relative error to the nearest slice of the full output by a split of the plan; 0 if none has its shape."""
        if output.ndim != expected.ndim:
            return 0.0
        dims = [dim for dim in range(expected.ndim) if output.shape[dim] != expected.shape[dim]]
        if len(dims) != 1:
            return 0.0
        length, errors = expected.shape[dims[0]], []
        of_sequence = self.resolution.plan.ranks(self.size).split(length)
        for split in {*self._splits(), of_sequence}:
            if length and length % split.length == 0:
                scaled = split.scaled(length // split.length)
                if scaled.widths[rank] == output.shape[dims[0]]:
                    errors.append(relative(output, take(expected, Layout(dims[0], scaled), rank)))
        return min(errors, default=0.0)

    def _splits(self) -> set[Split]:
        splits = {layout.split for layout in self.resolution.layouts.values() if layout is not None}
        return splits.union(*((heads.query, heads.kv) for heads in self.resolution.attention.values()))

    def _slice(self, full: Tensor, split: Split, rank: int) -> Tensor:
        """This rank's features of the full output; the full output if its width is not the split's length."""
        return take(full, Layout(full.ndim - 1, split), rank) if full.shape[-1] == split.length else full

    def _hint(self, name: str, expected: Tensor, outputs: Mapping[int, Tensor]) -> str:
        """The usual cause of this kind of difference."""
        values = list(outputs.values())
        if len(values) == self.size and all(value.shape == expected.shape for value in values):
            if _close(sum(values[1:], values[0]), expected):
                return "Each rank has a partial sum that nothing adds up."
            if all(_close(value, expected * self.size) for value in values):
                return f"It is {self.size} times too large: every rank's output was the full one, and was summed."
        if any(value.shape[:-1] == expected.shape[:-1] and _are_columns(value, expected) for value in values):
            return (
                "Every feature is one of the full output's, but not of those that this rank should have: fused parts "
                "are packed_colwise with parts in the order in which they are stored, and heads are sharded by "
                "attention."
            )
        if name in self.has_children:
            return (
                "All that is inside it agrees, so it is what it computes from them: something that it has for every "
                "head or feature is not sharded, or sharded in another way (with_query and with_key in a plan's "
                "attention)."
            )
        return "All that comes before it agrees."


def _numbered(trace: Trace) -> dict[tuple[str, int], Call]:
    """{(module, number of its earlier calls): call}, in the order of returns."""
    counts: dict[str, int] = {}
    numbered = {}
    for call in trace.calls:
        counts[call.name] = counts.get(call.name, -1) + 1
        numbered[call.name, counts[call.name]] = call
    return numbered


def _drawn(rule: Rule) -> str:
    return rule.strategy_name + (f" of parts {rule.parts}" if rule.parts is not None else "")


def _close(value: Tensor, reference: Tensor) -> bool:
    return relative(value, reference) <= GRADIENT_TOLERANCE


def _are_columns(output: Tensor, expected: Tensor) -> bool:
    """True if every feature of `output` is some feature of `expected`, for every token."""
    if not output.numel() or output.isnan().any():
        return False
    columns, expected_columns = output.flatten(0, -2).T, expected.flatten(0, -2).T
    distances = (columns[:, None] - expected_columns[None]).abs().amax(-1).amin(-1)
    return bool((distances <= OUTPUT_TOLERANCE * expected.abs().max()).all())
