"""The parts of a transformers model. No other package asks for the kind of a module."""
