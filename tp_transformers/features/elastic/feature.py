"""A server that loses ranks and gets them back: `tp-transformers serve --elastic`."""

from __future__ import annotations

from ...seams import Feature


class Elastic(Feature):
    """`tp-transformers serve --elastic`: the ranks that are left finish the requests of a lost rank."""

    requires = ("command_line", "reshard", "run", "serve", "shares", "watch")
    commands = {"serve": ".command"}


FEATURE = Elastic()
