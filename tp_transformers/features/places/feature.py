"""Places: where a rank is in the user's code, for the errors of other features."""

from __future__ import annotations

from ...seams import Feature

FEATURE = Feature()
"""Adds nothing by itself: features that compare ranks require it."""
