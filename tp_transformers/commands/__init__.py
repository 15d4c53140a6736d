"""What `tp-transformers` can do: one module a command, which says how it is called and does it.

Each has `SUMMARY`, a line; `EXAMPLE`, a command line for its help; `configure(parser)`, which adds its arguments; and
`run(arguments)`, which returns the exit code: 0 for yes, 1 for no (a plan that is wrong, a model that does not fit).
"""
