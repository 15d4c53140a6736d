"""The parts of a transformers model. No other package asks a module what it is."""
