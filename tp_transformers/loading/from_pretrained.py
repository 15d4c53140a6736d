"""Functions that run in place of transformers' own while the hook is on: `from_pretrained`, and four that it calls.

The rest (config, dtype, tying, initialising, the report, the generation config) stays transformers' own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from .. import torch_api, transformers_api
from ..checkpoint.reading.report import LoadReport
from ..errors import CheckpointError, TensorParallelError, UnsupportedError, release
from ..marks import untyped
from ..model.parallelize import parallelize
from ..plans.bind import Resolution
from ..plans.rules import Plan
from ..ranks.group import TensorParallelGroup
from ..ranks.mesh import check_size, join
from ..seams import added, features, first
from ..transformers_api import LoadStateDictConfig, LoadStateDictInfo
from .choose_plan import ModelPlan, plan_for, read_plan
from .forgotten import warn_of_full_copies, warn_of_one_rank, warn_of_size_alone
from .load import load, partition_initialized
from .options import INSTEAD, OPTIONS, check_arguments, refuse_without_tp_plan, take_options, with_options
from .request import LoadRequest
from .storage import Asked, Encoding, Storage

Instead = Callable[[PreTrainedModel, Plan, LoadRequest], tuple[Resolution, LoadReport, LoadStateDictInfo]]
"""(model on the meta device, its plan, request of the load) -> binding of the plan, and results as those of `load`."""


@dataclasses.dataclass
class _Load:
    """State of a running `from_pretrained(tp_plan=...)`."""

    asked: Asked
    tp_plan: Plan | ModelPlan | str
    group: TensorParallelGroup
    storage: Storage
    """Where the weights lie."""
    encoding: Encoding = dataclasses.field(default_factory=Encoding)
    """What the tensors of the checkpoint mean."""
    resolution: Resolution | None = None
    """Set once the model is parallelized."""


_current: ContextVar[_Load | None] = ContextVar("tp_transformers_load", default=None)
_instead: ContextVar[Instead | None] = ContextVar("tp_transformers_instead", default=None)
FAILURES: ContextVar[list[TensorParallelError] | None] = ContextVar("tp_transformers_failures", default=None)
"""Errors of loads, for a caller that collects them; None while there is none, since errors hold loaded tensors."""


def from_pretrained(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """`from_pretrained` of a model or Auto class: calls `original` unless there is a `tp_plan`.

    Arguments that a feature reads as one count as one.
    """
    try:
        return _from_pretrained(original, cls, args, kwargs)
    except TensorParallelError as error:
        failures = FAILURES.get()
        if failures is not None:
            failures.append(error)
        raise


def _from_pretrained(original: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for feature in features().values():
        planned = feature.planned(kwargs)
        if planned is not None:
            return planned(partial(load_with_plan, original, cls, args), kwargs)
    if kwargs.get("tp_plan") is None:
        refuse_without_tp_plan(kwargs)
        warn_of_size_alone(kwargs.get("tp_size"))
        if _current.get() is None:
            asked = Asked(cls, _name(args, kwargs), {}, kwargs)
            for kind in added("storages"):
                kind.check_unplanned(asked)
            if not kwargs.keys() & {"tp_size", "device_mesh", "distributed_config"}:
                warn_of_full_copies()
        return original(cls, *args, **kwargs)
    return load_with_plan(original, cls, args, kwargs)


def from_pretrained_with(instead: Instead, cls: Any, name: str | None, **kwargs: Any) -> Any:
    """Call `cls.from_pretrained(name, tp_plan=..., ...)` with `instead` in place of the load, in this process alone.

    The hook has to be on. Returns the model, with the parameters that `instead` made.
    """
    token = _instead.set(instead)
    try:
        return cls.from_pretrained(name, **kwargs)
    finally:
        _instead.reset(token)


def load_with_plan(original: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a `from_pretrained` that was given a `tp_plan`."""
    torch_api.check()
    transformers_api.check()
    tp_plan, tp_size, device_mesh = (kwargs.pop(name, None) for name in ("tp_plan", "tp_size", "device_mesh"))
    options = take_options(kwargs)
    asked = Asked(cls, _name(args, kwargs), options, kwargs)
    # 1. Find the ranks.
    instead = _instead.get()
    group = join(device_mesh) if instead is None else TensorParallelGroup(None, 0, 1, torch.device("cpu"))
    if instead is None and group.device_mesh is None and tp_size is None:
        warn_of_one_rank()
    with ExitStack() as stack, group.agree():
        # 2. Reject arguments that contradict one another.
        if torch.get_default_device().type == "meta":  # new tensors would have no values
            got = 'a load inside of torch.device("meta")'
            fix = "Leave out that context: a load makes its model on the meta device by itself."
            raise UnsupportedError("tp_plan", got=got, expected="a device that holds values", fix=fix)
        check_size(group, tp_size)
        check_arguments(asked.name, options, kwargs)
        group = dataclasses.replace(group, reduce_dtype=options.get("tp_reduce_dtype"))
        for argument in INSTEAD:
            kwargs.pop(argument, None)
        storage = first((kind.find(asked) for kind in added("storages")), Storage())
        current = _Load(asked, read_plan(tp_plan), group, storage)
        # 3. All ranks ask for the same weights.
        same: dict[str, object] = {"the releases": _releases(), **{kind.argument: None for kind in added("storages")}}
        same |= {argument: option.agreed(options.get(argument)) for argument, option in OPTIONS.items()}
        group.check_same(same | {storage.argument: storage.agreed})
        for feature in features().values():
            stack.enter_context(feature.around_load(group, options))
        # 4. The storage completes the arguments: with one commit for all files, or with the config in a file.
        storage.prepare(asked, group)
        # 5. Run transformers' load, with ours in place of its load of the weights; all ranks succeed or all fail.
        token = _current.set(current)
        try:
            result = original(cls, *args, device_map={"": group.device}, **kwargs)
        except SafetensorError as error:  # transformers looks into a file for its dtype before we open it
            raise CheckpointError(f"checkpoint {asked.name}: {error}") from error
        finally:
            _current.reset(token)
        model = result[0] if isinstance(result, tuple) else result
        if current.resolution is None:
            raise UnsupportedError(f"{type(model).__name__} does not load its weights where tp_plan could split them")
        # 6. Shard parameters that transformers has initialised because the checkpoint lacked them.
        partition_initialized(model, current.resolution, group)
        for feature in features().values():
            feature.loaded(model)
    return result


def _releases() -> str:
    """The releases that have to be the same on all ranks, without their builds: torch's differ by device."""
    return ", ".join(release(library).partition("+")[0] for library in ("torch", "transformers", "tp_transformers"))


def _in_load(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function(load, original, ...)` in place of transformers' `original(...)` in a load with a plan, until its
    model is parallelized: models that are made after it are transformers' own."""

    @wraps(function)
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is None or current.resolution is not None:
            return original(*args, **kwargs)
        return function(current, original, *args, **kwargs)

    return call


@_in_load
def resolve_files(current: _Load, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Names of a checkpoint's files and the metadata of its index; one rank per node downloads them, if they lack."""
    return current.storage.files(original, inspect.signature(original).bind(*args, **kwargs).arguments, current.group)


@_in_load
def find_chunks(current: _Load, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Return no folder for torch.distributed.checkpoint to load: a load with a plan reads the files itself."""


@_in_load
def find_quantizer(
    current: _Load, original: Callable[..., Any], config: Any, quantization_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return no quantizer, so that the model is built in floating point; all else is as in transformers.

    `config` is transformers' own copy; the settings of an encoding are removed from it. Raises UnsupportedError on
    settings that no feature reads.
    """
    folder, known = current.asked.folder or Path(config.name_or_path), current.storage.encoding
    where: dict[str, Any] = {"folder": folder, "known": known, "device": current.group.device}
    found = (kind.find(config, quantization_config, **where) for kind in added("encodings"))
    current.encoding = first(found, Encoding())
    is_quantized = quantization_config is not None or getattr(config, "quantization_config", None) is not None
    if is_quantized and type(current.encoding) is Encoding:
        fix = "Choose a checkpoint in floating point, without quantization_config."
        raise UnsupportedError("tp_plan", got="quantization_config", expected="weights in floating point", fix=fix)
    return original(config, None, *args, **kwargs)


@_in_load
def load_pretrained_model(
    current: _Load,
    original: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: LoadStateDictConfig,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Parallelize and load `model`, which is on the meta device; returns as transformers' own function does."""
    options, group, instead = current.asked.options, current.group, _instead.get()
    plan = with_options(plan_for(model, current.tp_plan, group), options)
    request = LoadRequest(
        config=load_config,
        options=options,
        files=checkpoint_files or (),
        state_dict=state_dict,
        storage=current.storage,
        encoding=current.encoding,
    )
    if instead is not None:
        current.resolution, report, info = instead(model, plan, request)
    else:
        asked = (feature.shares(plan, model, group, request) for feature in features().values())
        shares, reason = first(asked, (plan.shares, ""))
        current.resolution = parallelize(model, dataclasses.replace(plan, shares=shares), group)
        report, info = load(model, current.resolution, group, dataclasses.replace(request, shares_because=reason))
    untyped(model).tp_report = report
    untyped(model).tp_options = options
    untyped(model).tp_source = current.storage.origin(model.config.name_or_path, checkpoint_files or ())
    return info, None


def _name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a `from_pretrained`: the path or the name of a checkpoint."""
    return args[0] if args else kwargs.get("pretrained_model_name_or_path")
