"""Verify a plan against the unsharded model: `from tp_transformers.verify import verify`."""

from .features.verify.verify import Verdict, verify

__all__ = ["Verdict", "verify"]
