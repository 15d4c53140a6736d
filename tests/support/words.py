"""A tokenizer of the words w0, w1 and so on."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def words(count: int, *, special: str = "", **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of `count` words, of which w3 stands for unknown ones; `special`: a word that is skipped in texts."""
    tokens = Tokenizer(models.WordLevel({f"w{index}": index for index in range(count)}, unk_token="w3"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **options)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    return tokenizer
