"""Full adapters in the files of PEFT and transformers, on the ranks of a model, and swaps of adapters."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.saving.folder import SaveFolder, on_all_copies
from ...checkpoint.saving.save import gather, given_state
from ...checkpoint.saving.writer import Writer, named
from ...errors import CheckpointError, UnsupportedError
from ...marks import untyped
from ...patches import Patch, Undo, replace_all
from ...ranks.group import GROUP
from ...seams import Mixin, collective
from ...strategies import full_tensor
from ...transformers_api import LoadStateDictInfo
from ..hub_streaming.push import push
from .shard import full_adapters, unsupported

ADAPTER_FILE = "adapter_model.safetensors"


class AdaptedModel(Mixin):
    """Methods of a loaded model that read and write adapters of transformers' `add_adapter` and `load_adapter`."""

    @collective
    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a full PEFT adapter and keep this rank's shards. Collective."""
        if self.tp_group.device_mesh is None:
            return super().load_adapter(*args, **kwargs)
        return load_adapter(self, *args, **kwargs)

    @collective
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the active adapter alone, of a model with one. Collective; see `save_adapter`."""
        is_adapted = getattr(self, "_hf_peft_config_loaded", False)
        if is_adapted and not (kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint")):
            save_adapter(self, Path(save_directory))
        else:
            super().save_pretrained(save_directory, *args, **kwargs)


def save_peft_model(peft_model: Any, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of a PeftModel: rank 0 writes full adapters. Collective.

    Raises UnsupportedError if the adapter would be converted, and CheckpointError if it cannot be written.
    """
    group = GROUP.of(peft_model.base_model)
    save = type(peft_model).save_pretrained
    arguments = inspect.signature(save).bind(peft_model, *args, **kwargs).arguments
    options = {**arguments.pop("kwargs", {}), **arguments}
    del options["self"]
    if options.get("path_initial_model_for_weight_conversion") is not None:  # PEFT would load it, on rank 0 alone
        raise unsupported("save_pretrained of an adapter", "path_initial_model_for_weight_conversion")
    names = options.get("selected_adapters") or list(peft_model.peft_config)
    given = options.pop("state_dict", None)
    state = peft_model.state_dict(keep_vars=True) if given is None else given_state(given, group)
    embeddings = {key: options[key] for key in ("save_embedding_layers",) if key in options}
    wanted = {id(value) for name in names for value in _adapter(peft_model, state, name, **embeddings).values()}
    full = {name: gather(value, group) if id(value) in wanted else torch.empty(0) for name, value in state.items()}
    folder = Path(options["save_directory"])

    def write() -> None:
        with group.agree():
            if group.writes:
                with _complete(folder):
                    save(peft_model, **{"state_dict": full, **options})

    on_all_copies(group, folder, write, writes=group.writes)


@contextmanager
def _complete(folder: Path) -> Iterator[None]:
    """Remove new files if not all can be written; raises CheckpointError, with the folder, then."""
    before = {*folder.rglob("*")}
    try:
        yield
    except (OSError, SafetensorError) as error:
        for path in {*folder.rglob("*")} - before:
            with suppress(OSError):  # path may be a folder
                path.unlink()
        raise CheckpointError(
            f"folder {folder}",
            got=str(error),
            expected="that an adapter can be written",
            fix="Make room, or choose another folder.",
        ) from error


def push_peft_model(peft_model: Any, repo_id: str, **options: Any) -> Any:
    """`push_to_hub` of a PeftModel: rank 0 uploads full adapters. Collective."""
    options.pop("max_shard_size", None)
    return push(GROUP.of(peft_model.base_model), peft_model.save_pretrained, repo_id, **options)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the active adapter of transformers' `add_adapter` or `load_adapter` in full, from rank 0. Collective."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    group = GROUP.of(model)
    (name,) = next(module for module in model.modules() if isinstance(module, BaseTunerLayer)).active_adapters
    adapter = _adapter(model, model.state_dict(keep_vars=True), name)
    full = {f"base_model.model.{key}": gather(value, group) for key, value in adapter.items()}
    tensors = {key: value.detach() for key, value in full.items() if value is not None}
    config = copy.copy(model.peft_config[name])
    config.inference_mode = True

    def write() -> None:
        with group.agree():
            if group.writes:
                _write_adapter(config, tensors, folder)

    on_all_copies(group, folder / ADAPTER_FILE, write, writes=group.writes)


def _write_adapter(config: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    with SaveFolder(folder) as place:
        with closing(Writer(place.staging / ADAPTER_FILE, tensors)) as writer:
            for key, value in tensors.items():
                writer.write(key, value)
            writer.finish()
        with named(folder, "folder"):
            config.save_pretrained(str(place.staging))
            other_files = sorted({path.name for path in place.staging.iterdir()} - {ADAPTER_FILE})
        place.put([*other_files, ADAPTER_FILE])


def load_adapter(
    model: PreTrainedModel,
    peft_model_id: str | None = None,
    adapter_name: str | None = None,
    *,
    load_config: Any = None,
    peft_config: Any = None,
    adapter_state_dict: Mapping[str, Tensor] | None = None,
    is_trainable: bool = False,
    hotswap: bool | str = False,
    adapter_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> LoadStateDictInfo:
    """`load_adapter` of transformers: load a full adapter and keep this rank's shards. Collective.

    Arguments are transformers' own. Raises CheckpointError if tensors of the adapter are missing or unexpected,
    UnsupportedError for `hotswap=True`.
    """
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import load_peft_weights

    if hotswap is True:
        raise UnsupportedError(
            "load_adapter of a tensor-parallel model does not take hotswap; load it under a new name."
        )
    name, group = adapter_name or "default", model.tp_group
    hub = {**(getattr(load_config, "download_kwargs", None) or {}), **(adapter_kwargs or {})}
    hub |= {key: kwargs[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in kwargs}
    if name in (getattr(model, "peft_config", None) or {}):
        raise ValueError(f"Adapter with name {name} already exists. Please use a different name.")
    with group.agree():
        config = peft_config or PeftConfig.from_pretrained(peft_model_id, **hub)
        if getattr(config, "rank_pattern", None) and config.peft_type == "ADALORA":
            raise unsupported("load_adapter", "AdaLoRA with a rank pattern (PeftModel.from_pretrained takes it)")
        weights = adapter_state_dict or load_peft_weights(peft_model_id, device=str(group.device), **hub)
    config.inference_mode = not is_trainable
    inject_adapter_in_model(config, model, name)
    model._hf_peft_config_loaded = True
    prefix = "base_model.model."
    with group.agree():
        result = set_peft_model_state_dict(model, {k.removeprefix(prefix): v for k, v in weights.items()}, name)
        missing = {key for key in result.missing_keys if f".{name}" in key and ".ranknum." not in key}
        if result.unexpected_keys or missing:
            raise CheckpointError(
                f"adapter {peft_model_id or name}: missing {sorted(missing) or 'nothing'}, unexpected "
                f"{sorted(result.unexpected_keys) or 'nothing'}. Its config and its weights do not fit together."
            )
    if config.inference_mode:
        model.eval()
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.requires_grad_(False)
    empty: dict[str, Any] = {info.name: set() for info in dataclasses.fields(LoadStateDictInfo)}
    return LoadStateDictInfo(**{**empty, "error_msgs": [], "conversion_errors": {}})


def _adapter(model: nn.Module, state: Mapping[str, Tensor], name: str, **options: Any) -> dict[str, Tensor]:
    """This rank's parameters of the adapter called `name`, by their names in the file that PEFT saves."""
    from peft import get_peft_model_state_dict

    # PEFT gets indices in place of tensors: it would gather every DTensor of the model.
    tensors = list(state.values())
    numbers = {key: torch.tensor([index]) for index, key in enumerate(state)}
    configs: dict[str, Any] = untyped(model).peft_config
    config = configs[name]
    if config.peft_type == "ADALORA":  # PEFT would take the ranks that are left of each number
        configs[name] = copy.copy(config)
        configs[name].rank_pattern = None
    try:
        picked = get_peft_model_state_dict(model, state_dict=numbers, adapter_name=name, **options)
    finally:
        configs[name] = config
    # Prompts come as they are; every rank has them.
    return {key: tensors[int(number)] for key, number in picked.items() if key != "prompt_embeddings"}


_MODULE = "peft.utils.hotswap"


def _swap(original: Callable[..., None], model: Any, state_dict: Any, adapter_name: str, *args: Any, **kw: Any) -> None:
    """`hotswap_adapter_from_state_dict`, which `hotswap_adapter` calls. Collective."""
    full = {name: full_tensor(value) for name, value in state_dict.items()}
    with full_adapters(model, [adapter_name]):
        original(model, full, adapter_name, *args, **kw)


def _pad(original: Callable[..., bool], model: Any, *args: Any, **kw: Any) -> bool:
    """`_pad_lora_weights`; its caller, `prepare_model_for_compiled_hotswap`, may be imported before a load."""
    with full_adapters(model):
        return original(model, *args, **kw)


def _install() -> Undo:
    module = sys.modules[_MODULE]
    return replace_all([(module, "hotswap_adapter_from_state_dict", _swap), (module, "_pad_lora_weights", _pad)])


def _reject_swaps() -> Undo:
    """Reject tensor-parallel models in functions that would swap shards for full matrices."""
    module = sys.modules[_MODULE]
    names = ("hotswap_adapter", "hotswap_adapter_from_state_dict", "prepare_model_for_compiled_hotswap")
    reject = HOT_SWAPS.refusing(lambda model, *_, **__: GROUP.find(model) is not None)
    return replace_all((module, name, reject) for name in names if hasattr(module, name))


HOT_SWAPS = Patch("peft", "swaps of adapters", _install, module=_MODULE, without=_reject_swaps)
"""Makes swaps of adapters work on full matrices, and shards them again."""
