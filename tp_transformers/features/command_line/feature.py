"""What several commands need: arguments, and the config and the class of a checkpoint's model."""

from __future__ import annotations

from ...seams import Feature

FEATURE = Feature()
"""Adds nothing by itself: features with commands require it."""
