"""Tiny models of those types that share a plan with others, or are parts of models."""

from tests.support.tiny_model import Tiny, model_class
from tests.support.tiny_pairs import PAIRS
from tests.support.tiny_texts import TEXTS
from tests.support.tiny_towers import TOWERS

MODELS = {**TOWERS, **TEXTS, **PAIRS}

__all__ = ["MODELS", "TEXTS", "TOWERS", "Tiny", "model_class"]
