"""Holding of parameters in other forms than tensors; here, none. Features add holdings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from ..seams import features, first
from .encoding import Tensors
from .request import LoadRequest, Reads
from .targets import Targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Held(Protocol):
    """A rank's shard of a parameter in another form than a tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    @property
    def product(self) -> str:
        """Name of the way in which a forward multiplies it, for the report."""


class Holding:
    """Parameters of one rank that are held in another form; this class: none."""

    weights: Mapping[str, Held] = {}
    """Those that are held already, by name; `reads` fill them."""
    reads: Reads = []  # noqa: RUF012
    arriving: Collection[str] = ()
    """Names of those that `put` takes, each after its values have been read."""

    @classmethod
    def find(
        cls, model: PreTrainedModel, targets: Targets, shards: Tensors, device: torch.device, request: LoadRequest
    ) -> Holding | None:
        """The holding of this kind that a load asks for, of the `shards` of one rank; None: no parameter."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters in memory."""
        return sum(weight.nbytes for weight in self.weights.values())

    def check_in_order(self) -> None:
        """Raise UnsupportedError if products with the parameters are sums in another order than those of tensors."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Hold a parameter of `arriving`."""

    def hold(self, model: PreTrainedModel) -> None:
        """Make the modules of `model` compute with the parameters."""


def find_holding(
    model: PreTrainedModel, targets: Targets, shards: Tensors, device: torch.device, request: LoadRequest
) -> Holding:
    """The holding that a load asks for; arguments as in `Holding.find`."""
    kinds = (kind for feature in features().values() for kind in feature.holdings())
    return first((kind.find(model, targets, shards, device, request) for kind in kinds), Holding())
