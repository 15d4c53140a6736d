"""nnsight shows and edits full activations of tensor-parallel models, also where features are split unevenly.

nnsight's interleaver asks an object, its fragments, which activations are shards, and how to gather them. That of
nnsight knows DTensor's even placements; `FullActivations` takes its place and asks the strategies of our models. Values
inside a forward, which no module takes or returns (nnsight's `.source`), remain this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedError
from ...model.dropout import layer_strategy
from ...slices.layout import Split
from ...strategies.signature import BATCH, SEQUENCE
from .activations import (
    Side,
    features_split,
    full_activation,
    gather_features,
    local_activation,
    own_features,
)


class FullActivations:
    """nnsight's fragments of a tensor-parallel model."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        """{nnsight's path: module with a strategy}."""
        self.between: dict[str, list[nn.Module]] = {}
        """{path of a module without weights: the sharded linears beside it}."""

    @property
    def enabled(self) -> bool:
        """True if any activation is a shard."""
        return bool(self.modules)

    def instrument(self, envoy: Any) -> None:
        """Note a module of the model, after those that contain it.

        Raises UnsupportedError if ranks have other tokens or samples, which nnsight cannot index.
        """
        module = envoy._module
        children = [child for child in module.children() if _splits(child)]
        for name, child in module.named_children():
            if children and layer_strategy(child) is None and next(child.parameters(), None) is None:
                self.between[f"{envoy.path}.{name}"] = children
        if (strategy := layer_strategy(module)) is not None:
            if {strategy.signature.takes, strategy.signature.leaves} & {SEQUENCE, BATCH}:
                raise UnsupportedError(
                    f"nnsight at {envoy.path}",
                    got="a plan that shards the sequence or the batch",
                    expected="all tokens of all samples on every rank",
                    fix="Load without tp_sequence_parallel and tp_batch_sharded.",
                )
            self.modules[envoy.path] = module

    def fragmented(self, location: str) -> bool:
        """True if the input or output at `location` ("model.lm_head.output") is a shard."""
        path, side = _place(location)
        if side not in ("input", "output"):
            return False
        return path in self.between or (path in self.modules and features_split(self.modules[path], side) is not None)

    def whole(self, location: str, value: Any) -> tuple[Any, Callable[[Any], Any] | None]:
        """The full value, and the function that returns this rank's shard of it after an edit. Collective.

        Raises UnsupportedError for a module without weights if the linears beside it have several splits, and for
        attention weights.
        """
        path, side = _place(location)
        if path in self.between:
            return self._between(path, value)
        return self._apply(full_activation, path, side, value), lambda full: self.split(location, full)

    def _between(self, path: str, value: Any) -> tuple[Any, Callable[[Any], Any] | None]:
        linears = self.between[path]
        splits, strategy = {split for linear in linears for split in _splits(linear)}, layer_strategy(linears[0])
        assert strategy is not None
        split = next(iter(splits))
        widths = {x.shape[-1] for x in _tensors(value)}
        has_features = all(x.ndim <= 3 for x in _tensors(value))  # others are attention weights, with keys last
        if len(splits) > 1 or not has_features or not widths <= {split.length, split.widths[strategy.rank]}:
            raise UnsupportedError(
                f"nnsight at {path}",
                got="a module without weights beside sharded linears of several widths, or of attention weights",
                expected="a linear, or a module between linears of one width",
                fix="Read the output of the linear before it, or the input of the one after it.",
            )
        if widths <= {split.length}:  # after the sum of the last linear
            return value, None
        gather = partial(gather_features, split=split, strategy=strategy)
        return _on_tensors(gather, value), partial(_on_tensors, partial(own_features, split=split, strategy=strategy))

    def split(self, location: str, full: Any) -> Any:
        """This rank's shard of a full value."""
        path, side = _place(location)
        return full if path in self.between else self._apply(local_activation, path, side, full)

    def style_at(self, path: str) -> tuple[Any, Any]:
        """The one style of which nnsight neither shards inputs nor gathers outputs in a call: `call` does."""
        return "rowwise_split_input", None

    def call(self, module: Callable[..., Any], path: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module outside of the model's forward: it takes and returns full activations. Collective."""
        if path not in self.modules:
            return module(*args, **kwargs)
        args, kwargs = self._apply(local_activation, path, "input", (args, kwargs))
        return self._apply(full_activation, path, "output", module(*args, **kwargs))

    def _apply(self, function: Callable[[nn.Module, Tensor, Side], Tensor], path: str, side: Side, value: Any) -> Any:
        module = self.modules[path]
        return _on_tensors(lambda x: function(module, x, side), value)


def _splits(module: nn.Module) -> list[Split]:
    """Splits of the features that a linear takes or returns."""
    strategy = layer_strategy(module)
    splits = () if strategy is None else (strategy.sharded_input, strategy.sharded_output)
    return [split for split in splits if split is not None]


def _on_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to all tensors in `value`; ids and masks have no features."""
    from nnsight.util import apply

    return apply(value, lambda x: function(x) if x.is_floating_point() else x, Tensor)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _on_tensors(found.append, value)
    return found


def _place(location: str) -> tuple[str, Side]:
    path, _, side = location.rpartition(".")
    return path, side  # type: ignore[return-value]


def instrument(original: Callable[..., Any], interleaver: Any, envoy: Any) -> Any:
    """`Interleaver.instrument`, for a model before its modules; trees of other models keep their own fragments."""
    if not isinstance(interleaver.fragments, FullActivations) and any(map(layer_strategy, envoy._module.modules())):
        interleaver.fragments = FullActivations()
    return original(interleaver, envoy)


def call_envoy(original: Callable[..., Any], envoy: Any, *args: Any, **kwargs: Any) -> Any:
    """`Envoy.__call__`: a trace calls a module on its own, such as the head on an inner layer's output."""
    fragments = envoy.interleaver.fragments
    if not isinstance(fragments, FullActivations):
        return original(envoy, *args, **kwargs)
    return fragments.call(partial(original, envoy), envoy.path, *args, **kwargs)
