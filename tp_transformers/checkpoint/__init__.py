"""Checkpoints: where bytes are (index), where they come from (source), how they move (reader, conversion, save, sharded)."""
