"""What the signature of a strategy says of the sequence."""

from __future__ import annotations

from ...strategies.signature import LOCAL, PARTIAL, REPLICATED, SEQUENCE, Signature


def scatters_sequence(signature: Signature) -> bool:
    """True if the following modules compute on shards of the sequence."""
    return signature.leaves is SEQUENCE and signature.takes is not SEQUENCE


def gathers_sequence(signature: Signature) -> bool:
    """True for a block that gathers the sequence, and returns this rank's shard of its output."""
    return signature.takes is SEQUENCE and signature.inside is not None and signature.inside[0] is REPLICATED


def exchanges_tokens(signature: Signature) -> bool:
    """True for experts that receive the tokens of other ranks; each rank has its own tokens."""
    return signature.inside == (LOCAL, PARTIAL)
