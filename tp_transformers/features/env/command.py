"""`tp-transformers env`: versions, devices, transport and changes to other libraries, to paste into a report."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

SUMMARY = "print versions, devices, the transport between ranks, and what degrades, to paste into a report"
EXAMPLE = "tp-transformers env --json"

LIBRARIES = (
    *("torch", "transformers", "safetensors", "huggingface_hub", "accelerate", "peft", "trl", "gguf", "tokenizers"),
    *("bitsandbytes", "compressed-tensors", "gptqmodel", "torchao", "kernels", "lm_eval", "openai"),
)
"""Distributions with which this package works."""
PREFIXES = ("TP_TRANSFORMERS_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "HIP_", "SLURM_", "HF_HUB_")
"""Environment variables that are printed, except for those with a secret in their name."""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_ENDPOINT")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if the installed torch or transformers is not supported, else 0."""
    found = {}
    for name, values in sections():
        found[name] = values
        if not arguments.json:
            _print(name, values)
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 1 if found["not supported"] else 0


def _print(name: str, values: Any) -> None:
    """Print a section, at once: the next one may import for seconds."""
    lines = [f"{key} {value}".strip() for key, value in values.items()] if isinstance(values, dict) else values
    for line in lines or ["none"]:
        print(f"{name:15}  {line}", flush=True)
        name = ""


def sections() -> Iterator[tuple[str, Any]]:
    """Yield the sections of the report: a name, and lines or {key: value}."""
    from ... import __version__

    yield "tp_transformers", [__version__]
    yield "python", [f"{platform.python_version()} ({platform.python_implementation()}) on {platform.platform()}"]
    yield "libraries", {name: version for name in LIBRARIES if (version := _version(name)) is not None}
    yield "variables", {name: os.environ[name] for name in sorted(os.environ) if _is_shown(name)}
    yield "devices", list(_devices())
    yield "ranks", list(_ranks())
    yield "not supported", _refusals()
    yield "patched", {owner: ", ".join(names) for owner, names in sorted(_patched().items())}
    yield "lacking", _lacking()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_shown(name: str) -> bool:
    is_named = name in NAMES or name.startswith(PREFIXES)
    return is_named and not any(secret in name for secret in SECRETS)


def _devices() -> Iterator[str]:
    """Lines about the accelerator, and about the processor."""
    import torch

    from ...ranks.limits import visible_cores
    from ...torch_api import has_bfloat16

    kind = torch.accelerator.current_accelerator()
    if kind is not None:
        module = torch.get_device_module(kind.type)
        yield f"{torch.accelerator.device_count()} x {kind.type}"
        yield from (f"  {index}: {module.get_device_name(index)}" for index in range(module.device_count()))
    products = "products in bfloat16" if has_bfloat16() else "no products in bfloat16"
    cores, threads = visible_cores(), torch.get_num_threads()
    yield f"CPU: {platform.machine()}, {cores} cores for this process, {threads} threads, {products}"


def _ranks() -> Iterator[str]:
    """Lines about the backends, and the transport of ranks on this machine."""
    import torch.distributed as dist

    from ..shared_memory.joining import obstacle

    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    yield f"backends: {', '.join(name for name, is_available in backends.items() if is_available()) or 'none'}"
    why = obstacle()
    yield "CPU tensors of ranks on one machine: " + (f"gloo, since {why}" if why else "shared memory")


def _refusals() -> list[str]:
    """Errors of `enable()` and of a load with the installed releases."""
    from ... import torch_api, transformers_api
    from ...errors import UnsupportedError

    refusals = []
    for check in (torch_api.check, transformers_api.check):
        try:
            check()
        except UnsupportedError as error:
            refusals.append(str(error))
    return refusals


def _patched() -> dict[str, list[str]]:
    """{library: names that `enable()` or tensor-parallel models replace}."""
    found: dict[str, list[str]] = {}
    for patch in _patches():
        found.setdefault(patch.owner, []).append(patch.name)
    return found


def _lacking() -> dict[str, str]:
    """{name, or library: consequence} of what the installed releases lack.

    Applies every patch that waits for no import.
    """
    from ...patches import nothing
    from ...torch_api import lacking

    found: dict[str, list[str]] = {}
    for patch in _patches():
        patch.hold()
        if patch.missing:
            then = "without the change" if patch.without is nothing else "refused"
            found.setdefault(patch.owner, []).append(f"{patch.missing}: {patch.name} on a tensor-parallel model {then}")
        patch.release()
    return {**lacking(), **{owner: "; ".join(lines) for owner, lines in found.items()}}


def _patches() -> list[Any]:
    """Every patch."""
    from ...loading import from_pretrained, hook  # noqa: F401 - import those of the core
    from ...patches import ALL
    from ...seams import added

    added("model_patches")
    return ALL
