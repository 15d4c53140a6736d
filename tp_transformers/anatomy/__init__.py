"""The kinds of modules in a transformers model. No other package determines the kind of a module."""
