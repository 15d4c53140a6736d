"""Comparisons of a tensor-parallel model with one process: outputs, gradients, parameters, tokens, saved files.

Differences are relative to the largest magnitude of the reference. Functions that gather shards run on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import tp_transformers


def relative(value: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest magnitude of the reference; infinite where it is not a number."""
    assert value.shape == reference.shape
    if not torch.isfinite(value).all():
        return float("inf")
    return ((value - reference).abs().max() / reference.abs().max().clamp_min(1e-12)).item()


def largest_step(values: Tensor, reference: Tensor) -> float:
    """Largest difference of any element, relative to that element of the reference: losses or norms of steps."""
    return ((values - reference) / reference).abs().max().item()


def relative_errors(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """`relative` by name; both mappings have the same names."""
    assert values.keys() == expected.keys()
    return {name: relative(values[name], reference) for name, reference in expected.items()}


def worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """Name and size of the largest error."""
    return max(errors.items(), key=lambda item: item[1])


def different_tensors(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit by bit; both mappings have the same names."""
    assert values.keys() == expected.keys()
    return [name for name, reference in expected.items() if not torch.equal(values[name], reference)]


def full_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the unsharded parameters, by name."""
    return {name: tp_transformers.full_tensor(param) for name, param in model.named_parameters()}


def full_gradients(model: Any) -> dict[str, Tensor]:
    """Copies of the unsharded gradients, by name, of the parameters that have one on any rank."""
    grads = {name: tp_transformers.full_tensor(param, param.grad) for name, param in model.named_parameters()}
    return {name: grad for name, grad in grads.items() if grad is not None}


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by name, as each rank holds them, of the parameters that have one."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def gradient_errors(model: Any, seen: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative differences of gradients `seen`, which are shards, from the unsharded `expected`, by name.

    A gradient that is noise around zero (key biases without rotation) counts by its size, relative to the largest
    gradient of the model.
    """
    assert seen.keys() == expected.keys()
    largest = max((grad.abs().max().item() for grad in expected.values()), default=0.0)
    errors = {}
    for name, grad in seen.items():
        full = tp_transformers.full_tensor(model.get_parameter(name), grad)
        is_zero = expected[name].abs().max().item() < 1e-6 * largest
        errors[name] = full.abs().max().item() / largest if is_zero else relative(full, expected[name])
    return errors


def gradient_differences(model: Any, reference: Any) -> dict[str, float]:
    """Relative differences of the gradients of two models, unsharded, by name; the same parameters have one."""
    return relative_errors(full_gradients(model), full_gradients(reference))


def parameter_differences(model: Any, reference: Any) -> dict[str, float]:
    """Relative differences of the parameters of two models, unsharded, by name."""
    return relative_errors(full_parameters(model), full_parameters(reference))


def compare_seen(
    model: Any, seen: Mapping[str, Any], reference: Mapping[str, Any], *, noise: bool = False
) -> dict[str, Any]:
    """Logits and the worst gradient as relative differences, tokens as equal or not.

    `seen` and `reference` come from an `observe` of the tests; `model` still has the gradients of `seen`. `noise`:
    gradients may be noise around zero, as in `gradient_errors`.
    """
    if noise:
        errors = gradient_errors(model, seen["grads"], reference["grads"])
    else:
        errors = relative_errors(full_gradients(model), reference["grads"])
    return {
        "logits": relative(seen["logits"], reference["logits"]),
        "tokens": torch.equal(seen["tokens"], reference["tokens"]),
        "grads": worst(errors),
    }


def assert_as_one_process(found: Mapping[str, Any], logits: float, gradients: float) -> None:
    """Of what `compare_seen` found, tokens are equal and errors small; "loss", "agree", "read" if they are there."""
    assert found["logits"] < logits, found
    assert found["tokens"], found
    assert found["grads"][1] < gradients, found
    assert found.get("loss", 0.0) < logits, found
    assert found.get("agree", True), found
    assert found.get("read", 0) == 0, found


def ranks_agree(*tensors: Tensor) -> bool:
    """Whether all ranks have these tensors, bit by bit."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    return all(torch.equal(*pair) for others in everyone for pair in zip(others, tensors, strict=True))


def equal_parameters(model: Any, reference: Any) -> bool:
    """Whether the parameters of two models, unsharded, are equal bit by bit and in order."""
    full = tp_transformers.full_tensor
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.equal(full(mine), full(theirs)) for mine, theirs in pairs)


def equal_shards(model: Any, other: Any) -> bool:
    """Whether this rank holds equal shards of two tensor-parallel models, bit by bit and in order."""
    local = tp_transformers.local_tensor
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(local(mine), local(theirs)) for mine, theirs in pairs)


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by safetensors' own reader."""
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same_tensors(expected: str | Path, saved: str | Path) -> None:
    """The checkpoints of both folders have the same tensors, bit by bit, in whatever files."""
    before, after = read_folder(expected), read_folder(saved)
    assert before, "the comparison is of something"
    assert different_tensors(after, before) == []


def assert_same_files(expected: str | Path, saved: str | Path) -> None:
    """Saved under tensor parallelism, a checkpoint is what one process saves: same files, same bytes."""
    names = sorted(path.name for path in Path(expected).iterdir())
    assert sorted(path.name for path in Path(saved).iterdir()) == names
    for name in names:
        if name.endswith(".json"):
            assert (Path(saved) / name).read_text() == (Path(expected) / name).read_text(), name
    assert_same_tensors(expected, saved)
