"""Rewriting of a plan's rules by the names that they match, for options that do so."""

from __future__ import annotations

from ...seams import Feature

FEATURE = Feature()
"""Adds nothing by itself: features with options that rewrite plans require it."""
