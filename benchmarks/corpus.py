"""Training data: a text or data set as sequences of one length, in an order that does not depend on the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_transformers.errors import UsageError


class Corpus:
    """Sequences of `length` tokens; the sequences of a step depend only on the seed and the step number.

    All ranks draw the global batch and take their part of it: a run that resumes on another number of ranks continues
    with the same sequences.
    """

    def __init__(self, tokens: Tensor, length: int, seed: int) -> None:
        if len(tokens) < length:
            raise UsageError(
                "the text",
                got=f"{len(tokens)} tokens",
                expected=f"at least one sequence of {length}",
                fix="Give it more text, or a smaller --length.",
            )
        self.sequences = tokens[: len(tokens) // length * length].view(-1, length)
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, step: int, size: int) -> Tensor:
        """The sequences (size, length) of a step, counted from 0. Every sequence is drawn once per epoch."""
        return self.sequences[[self._drawn(number) for number in range(step * size, (step + 1) * size)]].long()

    def _drawn(self, number: int) -> int:
        epoch, place = divmod(number, len(self.sequences))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.sequences), generator=generator)
        return int(self._order[place])


def read_text(tokenizer: Any, path: Path) -> Tensor:
    """The tokens of a text file. Raises UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--text", got=f"{path}: {error}", expected="a file of text in UTF-8", fix="Name another one."
        ) from error
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int32)


def read_dataset(tokenizer: Any, name: str, split: str, column: str) -> Tensor:
    """The tokens of a Hugging Face data set, with the end-of-sequence token after every row.

    Args:
        tokenizer: a transformers tokenizer.
        name: a name on the Hub, or a folder of files that `datasets.load_dataset` reads.
        split: a split of it, or a part of one, such as "train[:1%]".
        column: the column with text.

    Raises UsageError without the library `datasets`, or if the data set, split or column does not exist.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            "--dataset",
            got="a Python without the library `datasets`",
            expected="one that has it",
            fix="pip install datasets, or pass --text FILE.",
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            "--dataset",
            got=f"{name!r}, split {split!r}: {error}",
            expected="a data set on the Hub, or a folder of files",
            fix="Check the name and --split.",
        ) from error
    if column not in rows.column_names:
        raise UsageError(
            "--column", got=repr(column), expected=f"one of {rows.column_names}", fix="Name the text's column."
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokens(some: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [ids + end for ids in tokenizer(some[column], verbose=False)["input_ids"]]}

    found = rows.map(tokens, batched=True, remove_columns=rows.column_names)
    return torch.cat([torch.tensor(ids, dtype=torch.int32) for ids in found["ids"]])
