"""Encoding of a checkpoint: what its tensors mean. Here, the values of parameters; features add other encodings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.conversion.convert import Conversion, convert
from ..errors import UnsupportedError
from ..seams import features, first
from ..slices.lazy import LazyTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, LazyTensor]
"""Tensors of a checkpoint, by name."""


class Encoding:
    """What the tensors of one checkpoint mean; this class: each is the value of a parameter.

    A subclass overrides what differs; its `find` and `find_in` decide whether a checkpoint is of its kind.
    """

    @classmethod
    def find(
        cls, config: Any, requested: Any, *, folder: Path | None, known: Encoding | None, device: torch.device
    ) -> Encoding | None:
        """The encoding that a config, or the caller's `quantization_config` (`requested`), asks for; None: of no kind.

        Removes the settings from `config`. `folder`: of a local checkpoint; `known`: that of all files of the storage.
        """
        return None

    @classmethod
    def find_in(cls, tensors: Tensors, names: Collection[str]) -> Encoding | None:
        """The encoding that tensors show, if no config says it; `names`: those of the model."""
        return None

    @classmethod
    def check_plain(cls, tensors: Tensors, conversion: Conversion, missing: Collection[str]) -> None:
        """Raise UnsupportedError if the tensors of a plain checkpoint are of this kind; `missing`: parameters."""

    def recognised(self, tensors: Tensors, names: Collection[str]) -> Encoding:
        """The encoding that tensors show, if no config says it; `names`: those of the model."""
        return first((kind.find_in(tensors, names) for kind in kinds()), self)

    def read_first(self, tensors: Tensors) -> list[str]:
        """Name the tensors whose values determine how others are sliced; they are read first."""
        return []

    def convert(
        self, model: PreTrainedModel, tensors: Tensors, shapes: Mapping[str, torch.Size], request: Any
    ) -> Conversion:
        """Write the parameters of `model`, of the full `shapes`, as expressions over `tensors` of a LoadRequest."""
        entries = None if request.storage.has_own_names else request.config.weight_mapping
        conversion = convert(model, tensors, shapes, entries)
        for kind in kinds():
            kind.check_plain(tensors, conversion, shapes.keys() - conversion.expressions.keys())
        return conversion

    def is_decoded(self, expression: LazyTensor) -> bool:
        """True if a parameter is in memory in two forms while it is read."""
        return False

    def log(self, stored: int, held: int, *, is_kept: bool) -> None:
        """Log bytes in files and in memory; `is_kept`: whether parameters have another form than tensors in memory."""


def kinds() -> list[type[Encoding]]:
    """The encodings of all features."""
    return [kind for feature in features().values() for kind in feature.encodings()]


def find_encoding(
    config: Any, requested: Any, *, folder: Path | None, known: Encoding | None, device: torch.device
) -> Encoding:
    """The encoding that a load asks for; arguments as in `Encoding.find`. Raises UnsupportedError if there is none."""
    for kind in kinds():
        found = kind.find(config, requested, folder=folder, known=known, device=device)
        if found is not None:
            return found
    if requested is not None or getattr(config, "quantization_config", None) is not None:
        fix = "Choose a checkpoint in floating point, without quantization_config."
        raise UnsupportedError("tp_plan", got="quantization_config", expected="weights in floating point", fix=fix)
    return Encoding()
