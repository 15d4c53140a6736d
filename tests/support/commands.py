"""The command line, called in the process of a test: `main(["plan", folder])` is `tp-transformers plan FOLDER`."""

from tp_transformers.commands.cli import main

__all__ = ["main"]
