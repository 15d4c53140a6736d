"""The tests. A tenth of their time went into collections of garbage; the pool collects after each call."""

import gc

gc.set_threshold(10_000)
