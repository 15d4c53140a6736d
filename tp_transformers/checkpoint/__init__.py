"""Checkpoints: where bytes are (index), come from (source) and go (reader, conversion), and how they are saved."""
