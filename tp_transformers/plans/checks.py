"""Checks of a bound plan: ranks sum each partial output and gradient once."""

from __future__ import annotations

from collections.abc import Iterator

from ..anatomy import features, fold_layers, holds_experts, is_attention, names_around
from ..slices.layout import Split, packed
from ..strategies.signature import FEATURES, LOCAL, PARTIAL
from .binding import Binding
from .rule import UNRULED

SUMMED = "replicated_with_grad_allreduce"
"""Strategy of a parameter that every rank applies to its own shard of the activations."""


def sum_faults(bound: Binding) -> Iterator[str]:
    """Faults: outputs and gradients that are not summed exactly once."""
    if bound.size > 1:
        for check in (_experts, _outputs, _heads, _other_gradients):
            yield from check(bound)


def scalars_between(bound: Binding) -> Iterator[str]:
    """Modules with learned scalars (activations) between a linear with sharded output and the linear that takes it."""
    for owner, child, _ in _between(bound):
        if all(param.numel() == 1 for param in bound.modules[child].parameters()) and owner:
            yield child


def unsummed_experts(bound: Binding) -> Iterator[str]:
    """Experts that are sharded or distributed over ranks, with outputs that no rule sums."""
    sums = bound.sums()
    for name in sorted(_partial_outputs(bound)):
        if holds_experts(bound.modules[name]) and not sums.intersection(names_around(name)):
            yield name


def _experts(bound: Binding) -> Iterator[str]:
    """Faults: experts that are neither complete on one rank nor have all matrices sharded along the same features."""
    for owner, module in bound.modules.items():
        if not holds_experts(module):
            continue
        place, layouts = fold_layers(owner), bound.own_layouts(owner)
        spread = [name for name, layout in layouts.items() if layout is not None and layout.dim == 0]
        rest = [name for name in layouts if name not in spread]
        if spread and rest:
            yield (
                f"{place}: each rank would hold complete experts of {', '.join(spread)}, but not of {', '.join(rest)}; "
                "make all of them local, or none"
            )
        matrices = {name: layouts[name] for name in rest if module.get_parameter(name).ndim == 3}
        splits = {name: layout.split for name, layout in matrices.items() if layout is not None}
        if spread or not splits:
            continue
        full = sorted(matrices.keys() - splits.keys())
        if full:
            sharded = ", ".join(sorted(splits))
            yield f"{place}: {sharded} would be sharded, but not {', '.join(full)}; shard all of them, or none"
            continue
        name, narrow = min(splits.items(), key=lambda item: item[1].length)
        for param, split in splits.items():
            if not _same_features(split, narrow, getattr(module, "is_concatenated", None)):
                yield (
                    f"{place}: {param} and {name} would be sharded along different features; a fused gate and up is "
                    "packed_colwise (packed_rowwise if it is stored transposed)"
                )


def _same_features(split: Split, narrow: Split, is_concatenated: bool | None) -> bool:
    """True if `split` gives every rank the features of `narrow`, once or (a fused gate and up) twice."""
    if split.length == narrow.length:
        return split == narrow
    pairs = split == narrow.scaled(2) and is_concatenated is not True
    return pairs or (split == packed([narrow, narrow]) and is_concatenated is not False)


def _outputs(bound: Binding) -> Iterator[str]:
    """Faults: partial outputs that are not summed, and other outputs that are."""
    partial, sums = _partial_outputs(bound), bound.sums()
    for name in sorted(partial):
        if not sums.intersection(names_around(name)):
            fix = f"{fold_layers(name)}: moe_tp_experts" if holds_experts(bound.modules[name]) else "gather around it"
            yield f"{fold_layers(name)}: on every rank its output is a partial sum that nothing adds up; add {fix}"
    for block in sorted(sums):
        inside = [name for name in bound.modules if f"{name}.".startswith(f"{block}.")]
        if not partial.intersection(inside):
            yield (
                f"{fold_layers(block)}: its output is replicated, and would be added up {bound.size} times; shard "
                "what is inside (local_colwise and local_rowwise, or experts), or leave it out"
            )
            continue
        for name in inside:
            if name != block and bound.signature(name).sums:
                yield f"{fold_layers(name)}: it sums its output, and {fold_layers(block)} sums again; use local_rowwise"
        for name in (name for name in bound.parameters if name.startswith(f"{block}.")):
            owner, _, param_type = name.rpartition(".")
            added_once = bound.param_strategies.get(name, UNRULED).added_once
            if bound.layouts.get(name) is not None or param_type in added_once:
                continue
            if owner == block:
                yield (
                    f"{fold_layers(name)}: it is replicated, and the outputs of all ranks are summed; shard it, or "
                    f"add {fold_layers(name)}: replicate_once if it is added to the output"
                )
            elif bound.has_whole_gradient(name):
                yield (
                    f"{fold_layers(name)}: it is in a block with partial outputs that are summed, so its gradient has "
                    f"to be summed too; add {fold_layers(owner)}: {SUMMED}"
                )


def _partial_outputs(bound: Binding) -> set[str]:
    """Modules with outputs that are partial sums."""
    partial = {name for name, strategy in bound.module_strategies.items() if strategy.signature.leaves is PARTIAL}
    sums = bound.sums()
    for name, module in bound.modules.items():
        if (holds_experts(module) or name in sums) and any(bound.own_layouts(name).values()):
            partial.add(name)
    for name, strategy in bound.param_strategies.items():  # experts may keep their parameters in a submodule
        owner = name.rpartition(".")[0]
        if strategy is not bound.module_strategies.get(owner) and bound.layouts.get(name) is not None:
            partial |= {owner for block in names_around(owner) if block in sums}
    return partial


def _heads(bound: Binding) -> Iterator[str]:
    """Faults: other parameters that compute on sharded heads; their gradient on each rank is partial."""
    for name, param in bound.parameters.items():
        owner = name.rpartition(".")[0]
        attention = next((module for module in names_around(owner) if module in bound.attention), None)
        signature = bound.param_strategies.get(name, UNRULED).signature
        projected = owner in bound.splits and owner not in bound.attention
        if attention is None or projected or signature.gathers_features or not bound.has_whole_gradient(name):
            continue
        heads = bound.attention[attention]
        # Latents are replicated; column-parallel layers sum their gradients, but not that of the rotary key.
        rotary_key = owner.endswith("kv_a_proj_with_mqa") and signature.leaves is not LOCAL
        if (heads.is_latent and not rotary_key) or not set(names_around(name)).isdisjoint(heads.hidden):
            continue
        lengths = {count * per for count in (heads.query.length, heads.kv.length) for per in (1, heads.head_dim or 1)}
        if rotary_key:
            fix = f"so its gradient has to be summed over the ranks; add {fold_layers(owner)}: mla_kv_a_proj"
        elif lengths.intersection(param.shape):
            target = fold_layers(name if owner == attention else owner)
            fix = (
                f"and has something for each of them; shard it too (add {target}: local_colwise, or sharded_norm for a "
                "norm over all heads, and name it under with_query or with_key in a YAML plan's attention section)"
            )
        else:
            fix = f"so its gradient has to be summed over the ranks; add {fold_layers(owner)}: {SUMMED}"
        yield f"{fold_layers(name)}: it computes on sharded heads, {fix}"


def _other_gradients(bound: Binding) -> Iterator[str]:
    """Faults outside attention: modules on sharded features that do not sum gradients, and other modules that do."""
    between, sums = set(), bound.sums()
    for _, child, width in _between(bound):
        between.add(child)
        for param_type, param in bound.modules[child].named_parameters():
            name = f"{child}.{param_type}"
            if bound.has_whole_gradient(name) and not bound.signature(child).gathers_features:
                rule = "sharded_norm" if width in param.shape else SUMMED
                yield (
                    f"{fold_layers(name)}: it is between linears with sharded features, and is replicated; add "
                    f"{fold_layers(child)}: {rule}"
                )
    for name, strategy in bound.module_strategies.items():
        signature = strategy.signature
        if signature.takes is not LOCAL or signature.gathers_features or name in between:
            continue
        parent = name.rpartition(".")[0]
        blocks = list(names_around(parent))
        if signature.gradient is not PARTIAL:
            if name not in bound.splits:
                yield (
                    f"{fold_layers(name)}: its input is replicated; use replicate, or name it under "
                    "with_query or with_key in a YAML plan's attention section"
                )
        elif not (
            sums.intersection(blocks)
            or any(is_attention(bound.modules[block]) for block in blocks)
            or any(bound.signature(sibling).leaves is FEATURES for sibling in bound.children(parent))
        ):
            yield (
                f"{fold_layers(name)}: its input is replicated, and so is its gradient, which would be "
                f"counted {bound.size} times; use replicate"
            )


def _between(bound: Binding) -> Iterator[tuple[str, str, int]]:
    """Yield (block, module, width): modules that compute on features that siblings leave sharded.

    They have parameters, or a rule, as a norm without a weight.
    """
    for block in (name for name, module in bound.modules.items() if not is_attention(module)):
        children = bound.children(block)
        leaving = [name for name in children if bound.signature(name).leaves is FEATURES]
        counts = [count for name in leaving if (count := features(children[name]))]
        if not counts or not any(bound.signature(name).takes is FEATURES for name in children):
            continue
        inputs, width = counts[0]
        for name, child in children.items():
            shapes = [param.shape for param in child.parameters()]
            if features(child) is not None or not (shapes or name in bound.module_strategies) or width == inputs:
                continue
            if all(shape.numel() == 1 or width in shape for shape in shapes):
                yield block, name, width
