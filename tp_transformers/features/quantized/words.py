"""GPTQ and AWQ: integers packed in words, with a scale and a zero point for every group of input features.

        GPTQ, along the input features          AWQ, of 4 bits along the output features
X.qweight  (in * bits / 32, out) int32          (in, out / 8) int32
X.qzeros   (groups, out * bits / 32) int32      (groups, out / 8) int32
X.scales   (groups, out)                        (groups, out)
X.g_idx    (in) int32

Zero points are stored minus 1 in the first version of GPTQ. `g_idx` is the group of every input feature, whatever
`desc_act` says; consecutive without it. AWQ has the four even ones of eight values in a word, then the four odd ones.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...slices.lazy import LazyTensor, Resident
from .affine import Affine, by_groups, pack_words
from .bundle import Bundle, Decode, DimMap, StoredValues
from .format import Format, Part, Tensors, bundle, described, inconsistent, packed, stored_tensor, unpack, unsupported

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Words(Format):
    """Every weight that has a `qweight`."""

    packed_dim: ClassVar[int]
    """The dim of `qweight` along which words are packed."""
    kinds: ClassVar[tuple[str, ...]] = ("qzeros", "scales")
    """The tensors beside the `qweight` of a module."""

    bits: int
    group: int | None
    """Input features that share a scale; None for all."""

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        modules = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
        result: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if module not in modules:
                self.check_alone(name)
            if kind == "qweight":
                words = stored_tensor(tensors, name, 2, torch.int32)
                result[f"{module}.weight"] = self.weight(tensors, module, words.shape)
            elif module not in modules or kind not in self.kinds:
                result[name] = tensor
        return result

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if len(shape) != 2 or any(length * self.bits % 32 for length in shape):
            return {}
        return described(self.parts(name.removesuffix(".weight"), shape[1]).values(), shape, dtype)

    @abstractmethod
    def check_alone(self, name: str) -> None:
        """Raise CheckpointError if the tensor `name`, whose module has no `qweight`, is one of a weight in words."""

    @abstractmethod
    def weight(self, tensors: Tensors, module: str, words: Sequence[int]) -> Bundle:
        """Build the weight of a module; `words`: the shape of its `qweight`.

        Raises CheckpointError if its stored tensors are inconsistent.
        """

    def parts(self, module: str, columns: int, *, is_ordered: bool = False) -> dict[str, Part]:
        """The words, scales and zero points of a module; every slice reads those of all groups if `is_ordered`."""
        dims = [DimMap(1), DimMap(0)]
        dims[self.packed_dim] = packed(dims[self.packed_dim].dim, self.bits)
        size = self.group or columns
        groups = -(-columns // size) if is_ordered or self.group is None else DimMap(1, size)
        return {
            "words": Part(f"{module}.qweight", dims, [torch.int32]),
            "scales": Part(f"{module}.scales", (groups, DimMap(0)), _FLOATS),
            "zeros": Part(f"{module}.qzeros", (groups, packed(0, self.bits)), [torch.int32]),
        }


@dataclass(frozen=True)
class Awq(Words):
    """AWQ's second version, in 4 bits with zero points."""

    title = "AWQ"
    packed_dim = 1

    bits: int = 4
    group: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Awq:
        bits = settings.get("bits", settings.get("w_bit", cls.bits))
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if bits != cls.bits or version != "gemm" or not settings.get("zero_point", True):
            zeros = "" if settings.get("zero_point", True) else " without zero points"
            got = f"AWQ in {bits} bits{zeros}, in the version {version}"
            raise unsupported(got, f"one in {cls.bits} bits with zero points, in the version gemm")
        group = settings.get("group_size", settings.get("q_group_size", 128))
        return cls(group=None if group < 1 else group)

    def check_alone(self, name: str) -> None:
        if name.endswith((".qzeros", ".scales")):
            got = "scales of activations" if name.endswith(".scales") else "zero points of no weight"
            raise inconsistent(name, got, "weights alone in AWQ")

    def weight(self, tensors: Tensors, module: str, words: Sequence[int]) -> Bundle:
        columns, width = words
        decode = Affine(self.decode, self.bits, self.group, "words", self.integers, self.scales, self.words, 0)
        shape = (width * 32 // self.bits, columns)
        return bundle(f"{module}.weight", tensors, self.parts(module, columns), shape, decode)

    def decode(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        return by_groups(self.integers(stored, shape), *self.scales(stored, shape), self.group)

    def integers(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        return self._unpack(stored["words"], shape[0])

    def scales(self, stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return stored["scales"].t(), self._unpack(stored["zeros"], shape[0])

    def _unpack(self, words: torch.Tensor, rows: int) -> torch.Tensor:
        """Unpack (n, rows / 8) to (rows, n)."""
        values: torch.Tensor = unpack(words, self.bits, rows).unflatten(1, (-1, 2, 4))
        return values.mT.flatten(1).t()

    def words(self, values: torch.Tensor) -> torch.Tensor:
        return pack_words(values.t().unflatten(1, (-1, 4, 2)).mT.flatten(1), self.bits)


@dataclass(frozen=True)
class Gptq(Words):
    """GPTQ, whose groups of input features may be in any order."""

    title = "GPTQ"
    packed_dim, kinds = 0, ("qzeros", "scales", "g_idx")
    all_bits: ClassVar = (2, 3, 4, 8)
    versions: ClassVar = ("gptq", "gptq_v2")

    ordered: bool
    """True if there must be a `g_idx` (`desc_act`). Unless its groups are consecutive, any rank may need any group."""
    less_one: bool
    """True if zero points are stored minus 1."""
    rules: tuple[tuple[re.Pattern[str], Gptq], ...] = ()
    """(pattern of module names, their settings), `dynamic` in a config; the first match applies."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gptq:
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        words = str(settings.get("pack_dtype") or "int32").removeprefix("torch.")
        if bits not in cls.all_bits or version not in cls.versions or words != "int32":
            expected = f"one of {', '.join(map(str, cls.all_bits))} bits, in the version {' or '.join(cls.versions)}"
            raise unsupported(f"GPTQ in {bits} bits, in the version {version}, in words of {words}", expected)
        rules = []
        for key, changes in (settings.get("dynamic") or {}).items():
            if not key.startswith("-:"):  # "-:" excludes modules from quantisation
                try:
                    pattern = re.compile(key.removeprefix("+:"))
                except re.error as error:
                    got = f"GPTQ with settings for {key!r} ({error})"
                    raise unsupported(got, "settings for regular expressions") from None
                rules.append((pattern, cls.of({**settings, **changes, "dynamic": None})))
        return cls(bits, None if group < 1 else group, bool(settings.get("desc_act")), version == "gptq", tuple(rules))

    def of_module(self, module: str) -> Gptq:
        """Return the settings of one module."""
        return next((settings for pattern, settings in self.rules if pattern.match(module)), self)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        module, form = name.removesuffix(".weight"), self.of_module(name.removesuffix(".weight"))
        size = form.group or shape[-1]
        columns = torch.arange(shape[-1], dtype=torch.int32)
        group_of = columns % -(-shape[-1] // size) if form.ordered else columns // size
        result = super(Gptq, form).stored(name, shape, dtype)
        return result and {**result, f"{module}.g_idx": group_of}

    def read_first(self, tensors: Tensors) -> list[str]:
        return [name for name in tensors if name.endswith(".g_idx")]

    def check_alone(self, name: str) -> None:
        module, _, kind = name.rpartition(".")
        if kind in ("qzeros", "g_idx"):
            raise inconsistent(f"{module}.qweight", "no such tensor", f"one for {name}")

    def weight(self, tensors: Tensors, module: str, words: Sequence[int]) -> Bundle:
        form, order = self.of_module(module), Part(f"{module}.g_idx", (DimMap(1),), (torch.int32, torch.int64))
        columns, is_ordered = words[0] * 32 // form.bits, form.ordered
        if order.name in tensors or is_ordered:
            group_of = order.find(tensors).tensor
            columns = len(group_of)
            if isinstance(group_of, Resident):  # not if only headers are read
                size, indices = form.group or columns, group_of.tensor
                is_ordered = not torch.equal(indices, torch.arange(columns).to(indices.dtype) // size)
                if is_ordered and not 0 <= indices.min() <= indices.max() < -(-columns // size):
                    got = f"groups from {int(indices.min())} to {int(indices.max())}"
                    raise inconsistent(order.name, got, f"those from 0 to {-(-columns // size) - 1}")
        form = replace(form, ordered=is_ordered)
        parts = form.parts(module, columns, is_ordered=is_ordered) | ({"order": order} if is_ordered else {})
        decode: Decode = form.decode
        if form.bits == 4 and not is_ordered:
            decode = Affine(decode, form.bits, form.group, "words", form.integers, form.scales, form.words)
        return bundle(f"{module}.weight", tensors, parts, (words[1], columns), decode)

    def decode(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        scales, offsets = self.scales(stored, shape)
        if self.ordered:  # every column names its group
            group_of = stored["order"].long()
            scales, offsets = scales[:, group_of], offsets[:, group_of]
        return by_groups(self.integers(stored, shape), scales, offsets, 1 if self.ordered else self.group)

    def integers(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        return unpack(stored["words"].t(), self.bits, shape[1])

    def scales(self, stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = stored["zeros"]
        if self.less_one and self.bits != 3:  # add 1 to all packed values; an overflow carries into the next value
            zeros = zeros + sum(1 << bit for bit in range(0, 31, self.bits))
        offsets = unpack(zeros, self.bits, shape[0]).t()
        return stored["scales"].t(), (offsets + 1) & 7 if self.less_one and self.bits == 3 else offsets

    def words(self, values: torch.Tensor) -> torch.Tensor:
        return pack_words(values, self.bits).t().contiguous()
