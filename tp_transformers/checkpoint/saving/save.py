"""Shards -> a standard checkpoint, written by rank 0 one tensor after the other.

Rank 0 gathers the full tensors of one module at a time on its CPU; a GPU holds its shards and one block in transfer.
Names, tensors and their distribution over files equal those of transformers' `save_pretrained`. If the checkpoint is
converted, the distribution may differ: transformers then counts the sizes of shared storages.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...anatomy import check_values, tied_parameters, without_values
from ...errors import CheckpointError, UnsupportedError
from ...logs import get_logger
from ...marks import Mark
from ...ranks.group import GROUP, TensorParallelGroup, agreed
from ...seams import features
from ...strategies import local_tensor, shard_of, unsharded_like
from ...torch_api import memory_of
from ...transformers_api import custom_object_save, revert_weight_conversion
from ..conversion.convert import FullModel
from ..reading.header import read_index, with_variant
from .folder import SaveFolder, on_all_copies
from .writer import Writer, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


class StoredForm(Protocol):
    """How a save writes the parameters of a model that have no values, in place of their values."""

    def state(self, model: PreTrainedModel, group: TensorParallelGroup) -> dict[str, Tensor]:
        """Placeholders of the tensors that a checkpoint has, by their names in it; see `values_of`. Collective."""

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Reshape a full tensor to the shape that checkpoints store."""

    def put_into(self, config: Any) -> None:
        """Write settings into the config of the checkpoint."""


STORED_FORM: Mark[StoredForm] = Mark("tp_stored_form")
"""Set on models with parameters without values."""
STORED_VALUES: Mark[Callable[[], Tensor]] = Mark("tp_stored_values")
"""Makes this rank's shard of a tensor; set on its placeholder in a state to save."""


def values_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor in a state to save, detached."""
    make = STORED_VALUES.find(tensor)
    return local_tensor(tensor) if make is None else make()


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
    **unsupported: Any,
) -> None:
    """Write configs and weights of a tensor-parallel model from rank 0. Collective: call on all ranks.

    Arguments as in transformers' `save_pretrained`. `is_main_process` matters on rank 0 only; other ranks never write.
    `state_dict` has this rank's shards, as `model.state_dict()`, or full tensors on rank 0, as accelerate's
    `get_state_dict(model)`.

    Raises:
        UnsupportedError: any other argument is set.
        CheckpointError: the folder is not writable, another save is running in it, or a feature refuses it.
    """
    _check_arguments(unsupported)
    group, folder = GROUP.of(model), Path(save_directory)
    # Assign tensors to files: from shapes alone, so equal on all ranks.
    dense, stored = saved_state(model) if state_dict is None else (_given_weights(model, state_dict), {})
    contents = _Contents(model, dense, stored, max_shard_size, variant, save_original_format)
    writes = group.writes and is_main_process
    on_all_copies(group, folder / CONFIG_NAME, partial(_save, model, folder, contents, group, writes), writes=writes)


def _save(model: PreTrainedModel, folder: Path, contents: _Contents, group: TensorParallelGroup, writes: bool) -> None:
    """Save from one copy, whose rank 0 writes if it `writes`. Collective over the ranks of the copy."""
    with ExitStack() as stack:
        # 1. Write the file headers to a hidden folder that readers ignore.
        with group.agree():
            files = _Files(contents, folder, stack) if writes else None
        model._tp_compare(group.gather(model._tp_sample()))
        # 2. Write the weights, a few at a time: every rank sends its shards, rank 0 writes.
        for names in _convertible_groups(contents, group):
            _write_together(names, contents, files, group)
        # 3. Write everything else. Once the last file is moved, the folder is this checkpoint.
        group.together(lambda: files.finish(model) if files is not None else None)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError on arguments of transformers' `save_pretrained` that are set and not supported here."""
    for name in ("safe_serialization", "save_peft_format", "token"):  # safetensors, without adapters, to a folder
        arguments.pop(name, None)
    if arguments.pop("save_function", None) is not None:
        logger.info("save_pretrained of a tensor-parallel model writes its files without save_function")
    names = sorted(name for name, value in arguments.items() if value not in (None, False))
    if names:
        raise UnsupportedError(
            f"save_pretrained of a tensor-parallel model does not take {', '.join(names)}. Save to a folder first; a "
            "plain model that is loaded from it takes them all."
        )


def given_state(state_dict: Mapping[str, Any], group: TensorParallelGroup) -> dict[str, Tensor]:
    """The tensors of a `state_dict` to save: shards, or rank 0's full tensors, with meta tensors on other ranks.

    Collective. Raises UnsupportedError on all ranks if only some have shards.
    """
    given = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    first, *others = group.gather(
        {
            name: (unsharded_like(value).shape, value.dtype, shard_of(value) is not None or isinstance(value, DTensor))
            for name, value in given.items()
        }
    )
    if not any(is_sharded for _, _, is_sharded in first.values()):
        empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype, _) in first.items()}
        return given if group.rank == 0 else empty
    if any(other != first for other in others):
        raise agreed(
            UnsupportedError(
                "save_pretrained(state_dict=...)",
                got="shards of rank 0 without those of other ranks",
                expected="the shards of every rank, or full tensors on rank 0",
                fix="Pass model.state_dict() on all ranks, or leave it out.",
            )
        )
    return given


def _given_weights(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """`given_state` for a model: each tied parameter once. Raises UnsupportedError for parameters without values."""
    check_values(model, "save_pretrained(state_dict=...)")
    dropped = {*(model._keys_to_ignore_on_save or ())}
    for target, source in tied_parameters(model).items():
        if target in state_dict and source in state_dict:
            memories = [memory_of(local_tensor(state_dict[name])) for name in (target, source)]
            dropped |= {target} if memories[0] == memories[1] else set()
    return given_state({name: value for name, value in state_dict.items() if name not in dropped}, GROUP.of(model))


class _Contents:
    """The files of a save and their tensors, from shapes alone. Collective: construct it on all ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        dense: dict[str, Tensor],
        stored: dict[str, Tensor],
        max_shard_size: int | str,
        variant: str | None,
        save_original_format: bool,
    ) -> None:
        self.tensors = dense | stored
        """This rank's tensors of the model."""
        self.stored, self.form = stored, STORED_FORM.find(model)
        self.meta = {name: unsharded_like(tensor) for name, tensor in self.tensors.items()}
        full_model: Any = FullModel(model, {name: self.meta[name].shape for name in dense})
        self._revert = partial(revert_weight_conversion, full_model) if save_original_format else dict
        self.state = self.revert(self.meta)
        """The tensors of the files, on the meta device."""
        self.variant = variant
        self.weights_name = with_variant(SAFE_WEIGHTS_NAME, variant)
        self.index_name = with_variant(SAFE_WEIGHTS_INDEX_NAME, variant)
        pattern = self.weights_name.replace(".safetensors", "{suffix}.safetensors")
        self.split = split_torch_state_dict_into_shards(
            self.state, filename_pattern=pattern, max_shard_size=max_shard_size
        )

    def revert(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert full tensors back to the names and tensors of the checkpoint that the model was loaded from.

        Those of a `StoredForm` have these names already.
        """
        dense = {name: value for name, value in values.items() if name not in self.stored}
        result = self._revert(dense) if dense else {}
        if self.form is not None:
            result |= {name: self.form.as_stored(name, values[name]) for name in values if name in self.stored}
        return result


def saved_state(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `dense_state` and the tensors of a `StoredForm`. Collective: call on all ranks."""
    form = STORED_FORM.find(model)
    return dense_state(model), form.state(model, GROUP.of(model)) if form is not None else {}


def dense_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters with values and persistent buffers by name, each tied parameter once."""
    absent = set(without_values(model))
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in state.items() if name not in absent}
    for target, source in tied_parameters(model).items():
        if state.get(target) is state.get(source):
            state.pop(target, None)
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return state


class _Files:
    """The open files of a save, on the rank that writes them."""

    def __init__(self, contents: _Contents, folder: Path, stack: ExitStack) -> None:
        """Write the headers to a hidden folder in `folder`; `stack` closes the files and removes the hidden folder.

        Raises CheckpointError if `folder` is not writable; see `Feature.check_save` too.
        """
        self.contents, self.writers = contents, dict[str, Writer]()
        self.place = stack.enter_context(SaveFolder(folder))
        with named(folder, "folder"):
            for feature in features().values():
                feature.check_save(folder, contents.variant)
            self.names = _names(self.place, contents.split.filename_to_tensors)
            self.before = names_in(folder / contents.index_name)
        for file, names in contents.split.filename_to_tensors.items():
            writer = Writer(self.place.staging / self.names[file], {name: contents.state[name] for name in names})
            self.writers[file] = stack.enter_context(closing(writer))

    def write(self, values: dict[str, Tensor]) -> None:
        """Write full tensors of the model to their files."""
        for target, value in self.contents.revert(values).items():
            self.writers[self.contents.split.tensor_to_filename[target]].write(target, value)

    def finish(self, model: PreTrainedModel) -> None:
        """Write configs and index, move all files into place, and remove those of an earlier save."""
        place, split = self.place, self.contents.split
        weights_name, index_name = self.contents.weights_name, self.contents.index_name
        for writer in self.writers.values():
            writer.finish()
        write_configs(model, place.staging)
        with named(place.path, "folder"):
            configs = config_last({path.name for path in place.staging.iterdir()} - set(self.names.values()))
            earlier = weights_name if split.is_sharded and os.path.lexists(place.path / weights_name) else None
        written = [*configs, *self.names.values()]
        if split.is_sharded:
            total = sum(unsharded_like(param).numel() for param in model.parameters())
            weight_map = {name: self.names[file] for name, file in split.tensor_to_filename.items()}
            index = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            with named(place.staging / index_name):
                (place.staging / index_name).write_text(text, encoding="utf-8")
            written = [*self.names.values(), *configs]
            # Readers use the index once there is no single weights file; the config is the second to last step.
            written.insert(len(written) if earlier is None else -1, index_name)
        place.put(written, instead_of=earlier)
        place.remove(_old_weights(place, weights_name, index_name, before=self.before, keep=written))


def _names(place: SaveFolder, files: Iterable[str]) -> dict[str, str]:
    """Map each file to its final name: its own, or a new one if an earlier checkpoint has a file of that name.

    A single file replaces its predecessor atomically. Several files do not: a reader could see old and new ones. If
    the folder is not locked, a concurrent save may be about to use the names, so files get new names too.
    """
    files = list(files)
    is_free = place.is_locked and not any(os.path.lexists(place.path / file) for file in files)
    if len(files) == 1 or is_free:
        return {file: file for file in files}
    save = secrets.token_hex(4)
    return {file: re.sub(r"(-\d{5}-of-\d{5}\.safetensors)$", rf"-{save}\1", file) for file in files}


def names_in(index: Path) -> set[str]:
    """Return the file names in the `weight_map` of an index or a manifest; empty if it cannot be read."""
    try:
        return set(read_index(index)[0].values())
    except CheckpointError:
        return set()


def _old_weights(
    place: SaveFolder, weights_name: str, index_name: str, *, before: Container[str], keep: Container[str]
) -> list[str]:
    """List the weight files of an earlier save into the folder, those that a reader would load first.

    `before` are the files that the index named when this save began. If the folder is not locked, all other files may
    belong to a concurrent save.
    """
    stem = re.escape(weights_name.removesuffix(".safetensors"))
    pattern = re.compile(rf"{stem}(-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}}\.safetensors")
    try:
        files = sorted(path.name for path in place.path.iterdir() if pattern.fullmatch(path.name))
    except OSError:  # the next save removes them
        files = []
    old = [name for name in files if place.is_locked or name in before]
    return [name for name in (weights_name, index_name, *old) if name not in keep]


def _convertible_groups(contents: _Contents, group: TensorParallelGroup) -> list[list[str]]:
    """Group the names so that each group can be reverted by itself: one group per module, else one for all."""
    groups: dict[str, list[str]] = {}
    for name in contents.meta:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    reverted = [contents.revert({name: contents.meta[name] for name in names}) for names in groups.values()]
    shapes = {name: tensor.shape for tensors in reverted for name, tensor in tensors.items()}
    if shapes == {name: tensor.shape for name, tensor in contents.state.items()}:
        return list(groups.values())
    if group.rank == 0:
        logger.warning("the weights are converted all together; rank 0 holds the full model while it saves")
    return [list(contents.meta)]


def _write_together(
    names: Sequence[str], contents: _Contents, files: _Files | None, group: TensorParallelGroup
) -> None:
    """Gather full tensors on rank 0, write and free them. Collective: call on all ranks."""
    tensors = {name: gather(contents.tensors[name], group) for name in names}
    values = {name: value for name, value in tensors.items() if value is not None}
    group.together(lambda: files.write(values) if files is not None else None)


def gather(tensor: Tensor, group: TensorParallelGroup) -> Tensor | None:
    """Gather the full tensor on the CPU of rank 0; None on other ranks."""
    shard = shard_of(tensor)
    if shard is not None:
        with group.agree() if tensor.is_meta else nullcontext():  # stored integers are converted
            local = values_of(tensor)
        return shard.gather(local)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu() if group.rank == 0 else None


def write_configs(model: PreTrainedModel, folder: Path) -> None:
    """Write everything of a checkpoint except its weights, as transformers does."""
    with named(folder, "folder"):
        if model._auto_class is not None:
            custom_object_save(model, folder, config=model.config)
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        form = STORED_FORM.find(model)
        if form is not None:
            form.put_into(config)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def config_last(names: Iterable[str]) -> list[str]:
    """Sort the names, the model's config last."""
    return sorted(names, key=lambda name: (name == CONFIG_NAME, name))
