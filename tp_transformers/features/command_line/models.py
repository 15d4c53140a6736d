"""Configs and classes: the config of a checkpoint, its model class, and its model on the meta device."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...errors import UnsupportedError, UsageError, in_one_line, is_path


def read_config(name: str | os.PathLike[str], **where: Any) -> PretrainedConfig:
    """Read the config of a folder, a file or a model on the Hub. Raises UsageError if there is none.

    `where` are arguments of `from_pretrained` such as revision. Custom code of the repository only runs, without a
    prompt, with `trust_remote_code=True`; raises UnsupportedError if it is needed.
    """
    path = os.fspath(name)
    if os.path.isfile(path) and os.path.basename(path) == "config.json":
        name = os.path.dirname(path) or "."  # the folder may contain custom code
    elif os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, where.get("subfolder") or "", "config.json")):
            fix = "Name the folder of a model, or a model on the Hub (org/name)."
            raise UsageError(path, got="a folder without config.json", expected="one with it", fix=fix)
    elif is_path(path) and not os.path.exists(path):
        fix = "Correct the path, or name a model on the Hub (org/name)."
        raise UsageError(path, got="no such folder", expected="one with config.json", fix=fix)
    try:
        where = {"trust_remote_code": False, **where}
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(name, **where)
    except Exception as error:  # a config class may raise any error about a field
        if not where["trust_remote_code"] and "trust_remote_code" in str(error):
            raise _needs_code(str(name)) from None
        expected, fix = "a config that transformers reads", "Correct its config.json."
        if not os.path.exists(path):
            expected, fix = "a folder with a config.json, or a model on the Hub", "Correct the name."
            if "connect" in str(error):
                fix = "Connect to the Hub, or name a folder; HF_HUB_OFFLINE=1 looks in the cache alone, and at once."
        raise UsageError(path, got=in_one_line(error), expected=expected, fix=fix) from error
    return config


def most_tokens(config: PretrainedConfig) -> int | None:
    """The most tokens of a sequence that the model of `config` takes; None if the config does not say it."""
    text = config.get_text_config(decoder=True)
    most: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for scaled in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):  # may be by type of layer
        if most and scaled.get("rope_type") in ("dynamic", "linear", "yarn"):
            most = max(most, int(scaled.get("original_max_position_embeddings", most) * scaled["factor"]))
    return most


def own_class(config: PretrainedConfig, **where: Any) -> type[PreTrainedModel] | None:
    """The custom model class of a repository, whose code this runs; None if it has none or is not trusted.

    Args:
        config: the result of `read_config`.
        where: the arguments of `read_config`.
    """
    auto_map: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    models = {auto: reference for auto, reference in auto_map.items() if auto.startswith("AutoModel")}
    auto = next(iter(sorted(models, key=lambda auto: (auto == "AutoModel", "CausalLM" not in auto))), None)
    if auto is None or not where.get("trust_remote_code"):
        return None
    where = {key: value for key, value in where.items() if key not in ("trust_remote_code", "subfolder")}
    cls: type[PreTrainedModel] = get_class_from_dynamic_module(models[auto], config.name_or_path, **where)
    cls.register_for_auto_class(auto)  # as the Auto class does, so that saves copy the code
    return cls


def known_class(config: PretrainedConfig, **where: Any) -> type[PreTrainedModel] | None:
    """The model class of a checkpoint: custom code if trusted, else the first class that the config names, else a
    registered class, one that generates if possible. None if there is none.

    `where` are the arguments of `read_config`.
    """
    return own_class(config, **where) or next(_named(config), None) or _generating(_registered(config))


def model_class(config: PretrainedConfig, **where: Any) -> type[PreTrainedModel]:
    """As `known_class`, for the commands `plan`, `verify` and `suggest`. Raises UnsupportedError if there is none."""
    return _required(config, known_class(config, **where))


def generating_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """A class that generates with a model of this config, even if the config names another class.

    It has the parameters of all classes of the model type, including a head, so that a plan covers them. Raises
    UnsupportedError if transformers has no class for the config.
    """
    return _required(config, _generating((*_named(config), *_registered(config))))


def without_memory(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Make a model on the meta device; `config` is copied, since some classes modify it."""
    with torch.device("meta"):
        model: PreTrainedModel = cls._from_config(copy.deepcopy(config))
    return model


def _named(config: PretrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """The transformers classes that the config names."""
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            yield cls


def _registered(config: PretrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """The classes that Auto classes register for the config; those with the most modalities first."""
    mappings: list[Mapping[Any, Any]] = [
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        transformers.MODEL_MAPPING,
    ]
    if config.is_encoder_decoder:
        mappings.append(mappings.pop(1))
    for mapping in mappings:
        registered = mapping.get(type(config), None)
        yield from registered if isinstance(registered, tuple) else filter(None, (registered,))


def _generating(classes: Any) -> type[PreTrainedModel] | None:
    """The first of `classes` that generates, else the first."""
    candidates = list(classes)
    return next((cls for cls in candidates if cls.can_generate()), next(iter(candidates), None))


def _required(config: PretrainedConfig, cls: type[PreTrainedModel] | None) -> type[PreTrainedModel]:
    if cls is None:
        if getattr(config, "auto_map", None):
            raise _needs_code(f"model_type {config.model_type}")
        got, expected = "no class of that kind in transformers", "an architecture that transformers has"
        fix = "Install a transformers that has it."
        raise UnsupportedError(f"model_type {config.model_type}", got=got, expected=expected, fix=fix)
    return cls


def _needs_code(subject: str) -> UnsupportedError:
    return UnsupportedError(
        subject,
        got="a model of its repository's own code, which was not run",
        expected="one of transformers, or leave to run that code",
        fix="Read the code; then pass --trust-remote-code, or trust_remote_code=True in Python.",
    )
