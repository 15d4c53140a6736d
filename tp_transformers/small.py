"""An architecture in small: a config -> a random model of the same structure that runs in a moment, and its inputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .errors import UnsupportedError, UsageError, describe

WIDTHS = re.compile(r"hidden|inner|embd|embed_dim|_dim$|^dim$|^d_|_rank$|ffn|ff_dim|intermediate|head_size|width|headdim")
NO_WIDTHS = re.compile(r"vocab|^num_|^n_|factor|kernel|conv|state|token|window|chunk|patch|_id$|layers|ratio|groups")
LAYERS = re.compile(r"^(num_|n_|encoder_|decoder_)?((hidden|decoder|encoder|layer)_)?layers?$|^depth$")
POSITIONS = re.compile(r"position|max_seq_len|^n_ctx$")
EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
"""What configs call widths, what only looks like one, counts of layers, of positions and of experts."""

SMALL = 2_000_000
"""Parameters of a model that is run as it is; larger ones have their widths divided."""
MOST = 50_000_000
"""Parameters of the largest model that is run."""
TOKENS, BATCH, VOCABULARY = 11, 2, 1000


def load_config(model: str | Path) -> PreTrainedConfig:
    """The config of a folder, a config file or a name on the Hub. Raises UsageError or UnsupportedError."""
    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        raise UsageError(
            describe(
                str(model),
                got=str(error).splitlines()[0],
                expected="a folder with a config.json, such a file, or the name of a model on the Hub",
                fix="Correct it.",
            )
        ) from None
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            describe(
                str(model),
                got=str(error).splitlines()[0],
                expected=f"an architecture of transformers {transformers.__version__}",
                fix="Install a release that has it; code that comes with a model is not run.",
            )
        ) from None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that is loaded with such a config: the one that it names, else the first that can generate.

    Raises UnsupportedError where there is none.
    """
    for name in getattr(config, "architectures", None) or ():
        if inspect_class(getattr(transformers, name, None)):
            return getattr(transformers, name)  # type: ignore[no-any-return]
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ):
        try:
            found = mapping[type(config)]
        except (KeyError, ValueError):
            continue
        return found[0] if isinstance(found, tuple) else found
    raise UnsupportedError(
        describe(config.model_type, got="no model class", expected="one of transformers", fix="Name another model.")
    )


def inspect_class(value: Any) -> bool:
    """Whether a value is a model class."""
    return isinstance(value, type) and issubclass(value, PreTrainedModel)


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, on the meta device. Raises UnsupportedError where the config makes none."""
    cls = model_class(config)
    try:
        with torch.device("meta"):
            return cls._from_config(copy.deepcopy(config))
    except Exception as error:  # whatever transformers raises where a config is no model
        raise UnsupportedError(
            describe(
                f"{cls.__name__} of this config",
                got=f"{type(error).__name__}: {error}",
                expected="a model",
                fix="Correct the config.",
            )
        ) from error


def small_model(config: PreTrainedConfig) -> tuple[PreTrainedModel, Callable[[], Any]]:
    """A random model with the modules of the config's, and a function that runs it on random inputs, with gradients.

    Widths are divided by one number, so that what divides each other still does; heads stay as many; layers and experts
    become few, yet all modules that a layer may have remain. The weights are large, so that nothing is lost in rounding.

    Raises UnsupportedError where no small model runs.
    """
    meta = meta_model(config)
    wanted, size = names(meta), sum(param.numel() for param in meta.parameters())
    why = "it is too large"
    for layers in (2, 4, 8, 16, None):
        for factor in (1,) if size <= SMALL else (32, 16, 8, 4, 2, 1):
            try:
                shrunk = shrink(config, factor=factor, layers=layers)
                made = meta_model(shrunk)
                if names(made) != wanted or sum(param.numel() for param in made.parameters()) > MOST:
                    continue
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    model = _random(shrunk)
                    given = inputs(model)
                    model(**given)
                return model, lambda model=model, given=given: model(**given)  # type: ignore[misc]
            except Exception as error:  # whatever transformers raises where sizes do not fit together
                why = f"{type(error).__name__}: {error}".splitlines()[0]
    raise UnsupportedError(
        describe(
            config.model_type,
            got=f"no small model of it that runs ({why})",
            expected="one, to see which features reach which",
            fix="Write its plan by hand: see CONTRIBUTING.md, Add an architecture in five steps.",
        )
    )


def names(model: nn.Module) -> set[str]:
    """The names of a model's parameters, layer numbers and experts' folded."""
    return {fold(model, name) for name, _ in model.named_parameters()}


def fold(model: nn.Module, name: str) -> str:
    """A name with the numbers of module lists replaced by `*`; those of an nn.Sequential tell its modules apart."""
    owner: Any = model
    path = []
    for step in name.split("."):
        path.append("*" if isinstance(owner, nn.ModuleList) and step.isdecimal() else step)
        owner = getattr(owner, step, None)
    return ".".join(path)


def shrink(config: PreTrainedConfig, *, factor: int, layers: int | None) -> PreTrainedConfig:
    """A copy of a config: widths by `factor`, at most `layers` layers (None: all), few experts and positions."""
    small = copy.deepcopy(config)
    before = max((value for name, value in _numbers(small) if LAYERS.search(name)), default=0)
    for owner in _owners(small):
        values = owner if isinstance(owner, dict) else vars(owner)
        for name, value in list(values.items()):
            new = _shrunk(name, value, factor, layers, before)
            if new is not value:
                values[name] = new
    return small


def _shrunk(name: str, value: Any, factor: int, layers: int | None, before: int) -> Any:
    if isinstance(value, list) and layers is not None and len(value) == before > layers:
        return value[:layers]
    if isinstance(value, list) and "section" in name and factor > 1:
        return [part // factor or 1 for part in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if LAYERS.search(name):
        return value if layers is None else min(value, layers)
    if POSITIONS.search(name):
        return min(value, 64)
    if factor == 1:
        return value
    if EXPERTS.search(name):
        return min(value, 16)
    if name == "vocab_size":
        return min(value, VOCABULARY)
    if name.endswith(("token_id", "token_index")):
        return value if value < VOCABULARY else VOCABULARY - 1 - value % 100
    if WIDTHS.search(name) and not NO_WIDTHS.search(name) or name in ("n_embd", "n_inner"):
        return max(value // factor, 1)
    return value


def _owners(config: Any) -> Iterator[Any]:
    """A config and all configs and dicts in it."""
    yield config
    for value in list((config if isinstance(config, dict) else vars(config)).values()):
        if isinstance(value, PreTrainedConfig | dict):
            yield from _owners(value)


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for owner in _owners(config):
        for name, value in (owner if isinstance(owner, dict) else vars(owner)).items():
            if isinstance(value, int):
                yield str(name), value


def _random(config: PreTrainedConfig) -> PreTrainedModel:
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    for owner in _owners(config):
        if not isinstance(owner, dict) and hasattr(owner, "use_cache"):
            owner.use_cache = False
    model = model_class(config)._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 1 or "norm" in name:
                param.add_(torch.randn_like(param) * 0.2)
            elif param.std() < 0.1:
                param.normal_(std=0.2)
    return model


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random arguments for a model's forward: what its class calls its main input, and tokens for a decoder."""
    config, main = model.config, model.main_input_name
    text = config.get_text_config()
    highest = min(config.vocab_size if hasattr(config, "vocab_size") else text.vocab_size, 90)
    tokens = torch.randint(3, highest, (BATCH, TOKENS))
    given: dict[str, Tensor] = {}
    if main == "input_features":
        given[main] = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "pixel_values" and not hasattr(config, "text_config"):
        given[main] = torch.randn(BATCH, config.num_channels, config.image_size, config.image_size)
    elif main == "input_values":
        given[main] = torch.randn(BATCH, 4000)
    else:
        given["input_ids"] = tokens
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens.flip(1)
    return given
