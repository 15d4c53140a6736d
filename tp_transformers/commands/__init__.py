"""The commands of `tp-transformers`, one module or folder each.

A command has `SUMMARY`, a line; `EXAMPLE`, a command line for its help; `configure(parser)`, which adds its arguments;
and `run(arguments)`, which returns the exit code: 0 for yes, 1 for no (a plan that is wrong, a model that does not
fit). A command imports torch and transformers in `run`, so that `--help` is fast.
"""

REFUSED = 2
"""Exit code of a command, and of its ranks, that cannot serve a request."""
