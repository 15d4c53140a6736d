"""The layers that draft tokens in `generate(use_mtp=True)`: each rank reads its slices of their weights.

transformers reads them in each such `generate`, by `MtpModel.from_pretrained(model)`, whose place this load takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ...anatomy import base_prefix
from ...errors import CheckpointError, UnsupportedError
from ...loading.from_pretrained import load_with_plan
from ...loading.hook import enable
from ...patches import Patch, Undo, nothing, replace
from ...plans.bind import Resolution
from ...plans.rule import Entry, Rule
from ...plans.rules import Plan
from ...ranks.group import GROUP
from ...seams import plan_options
from ...strategies import State
from ...transformers_api import LoadStateDictConfig, WeightRenaming, modeling_utils

P = TypeVar("P", Rule, Entry)

PROJECTION = (
    Rule("layers.*.eh_proj", "colwise_rep"),
    *(Rule(f"layers.*.{norm}", "replicate", optional=True) for norm in ("enorm", "hnorm", "post_norm")),
    Rule("shared_post_norm", "replicate", optional=True),
)
"""Rules of what is around the block of a layer: the projection of an embedding and a hidden state, and norms."""


def drafting_plan(model: PreTrainedModel, plan: Plan) -> Plan:
    """Rules of `plan`, of `model`, for the layers of transformers' MtpModel, whose blocks are the model's layers."""
    return dataclasses.replace(
        plan,
        source=f"{plan.source}, for the layers of multi-token prediction",
        rules=(*PROJECTION, *_in_blocks(plan.rules, model)),
        entries=_in_blocks(plan.entries, model),
        model_types=(),
        inner_models=(),
        options={"allow_replicated": True},  # the model has been accepted
        notes=(),
    )


def _in_blocks(entries: Iterable[P], model: Any) -> tuple[P, ...]:
    """The entries of layers, by the names of blocks; of two with one name, that of the later layer."""
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    layer = re.compile(rf"{re.escape(decoder)}\.layers\.(\*|\d+)(?=\.|$)")
    found: dict[str, P] = {}
    for entry in entries:
        name, count = layer.subn("layers.*.mtp_block", entry.full(base_prefix(model)))
        if count:
            found[name] = dataclasses.replace(entry, pattern=name, in_base_model=False, optional=True)
    return tuple(found.values())


SHARED = ("embed_tokens", "shared_head", "rotary_emb")
"""Modules of transformers' MtpModel that are the model's own."""


def _load(original: Callable[..., Any], cls: Any, main_model: Any, device_map: Any = None, **kwargs: Any) -> Any:
    """`MtpModel.from_pretrained` of a model on several ranks. Collective.

    Raises:
        CheckpointError: the checkpoint lacks a weight of the layers.
        UnsupportedError: ranks have other tokens or samples between blocks.
    """
    group = GROUP.find(main_model)
    if group is None or group.size == 1:
        return original(cls, main_model, device_map=device_map, **kwargs)
    resolution = main_model.tp_resolution
    _check_activations(resolution)
    rewriting = {option.argument for option in plan_options()}  # the plan in force has been rewritten for them
    arguments = {name: value for name, value in main_model.tp_options.items() if name not in {*rewriting, "tp_shares"}}
    arguments |= {"tp_plan": drafting_plan(main_model, resolution.plan), "device_mesh": group.device_mesh}
    arguments["revision"] = main_model.tp_source.get("commit_hash")
    with enable():
        model = load_with_plan(partial(_read, main_model), cls, (main_model.config.name_or_path,), arguments)
    model.tie_with_main_model(main_model)
    return model


def _check_activations(resolution: Resolution) -> None:
    """Raise UnsupportedError if a rank has some of the tokens or samples between blocks: embeddings are shared."""
    leaves = {strategy.signature.leaves for strategy in resolution.module_strategies.values()}
    if leaves & {State.SEQUENCE, State.BATCH}:
        raise UnsupportedError(
            "generate's use_mtp",
            got="a model that shards activations along the sequence or the batch",
            expected="full activations between blocks",
            fix="Load the model without tp_sequence_parallel and tp_batch_sharded, or leave out use_mtp.",
        )


def meta_layers(model: PreTrainedModel) -> Any:
    """The layers that draft for `model`, as a transformers MtpModel on the meta device; None if it has none.

    The modules that the layers share with the model are left out.
    """
    from transformers import modeling_layers

    cls: Any = getattr(modeling_layers, "MtpModel", None)  # since transformers 5.24
    count = getattr(model.config.get_text_config(), "num_mtp_layers", None)
    if cls is None or not count:
        return None
    with ExitStack() as stack:
        for context in cls.get_init_context(model.config.dtype, False, False, None):
            stack.enter_context(context)
        layers = cls(model, count)
    for shared in SHARED:
        setattr(layers, shared, None)
    return layers


def _read(main_model: Any, cls: Any, name: str, *, device_map: Any, revision: str | None) -> Any:
    """Make the layers and read their weights; runs in place of transformers' own `from_pretrained`."""
    config = type(main_model.config).from_pretrained(name, revision=revision)  # with the settings of quantised weights
    modeling_utils.get_hf_quantizer(config, None, device_map, True, None)
    layers = meta_layers(main_model)
    files, metadata = modeling_utils._get_resolved_checkpoint_files(
        pretrained_model_name_or_path=name,
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        user_agent=None,
        is_remote_code=False,
        download_kwargs={"revision": revision},
    )
    weights = cls.get_mtp_weights_regex(main_model).pattern
    others = WeightRenaming(rf"^(?!.*(?:{weights}))", "of_the_model.")  # both have a layer 0, the checkpoint has not
    request = LoadStateDictConfig(
        pretrained_model_name_or_path=name,
        sharded_metadata=metadata,
        device_map=device_map,
        dtype=main_model.config.dtype,
        weight_mapping=[others, *layers.get_weight_conversions(main_model)],
    )
    info, _ = layers._load_pretrained_model(layers, None, files, request)
    if info.missing_keys:
        got = f"none for {', '.join(sorted(info.missing_keys)[:3])}, ..."
        fix = "Leave out use_mtp, or take a checkpoint with these layers."
        raise CheckpointError(f"checkpoint {name}", got=got, expected="the weights of its MTP layers", fix=fix)
    return layers


def _install() -> Undo:
    from transformers import modeling_layers

    layers = getattr(modeling_layers, "MtpModel", None)
    return nothing() if layers is None else replace(layers, "from_pretrained", _load)


LAYERS = Patch("transformers", "MtpModel.from_pretrained", _install)
