"""Proof of a plan against one process: `from tp_transformers.verify import verify`."""

from .commands.verify.verify import Verdict, verify

__all__ = ["Verdict", "verify"]
