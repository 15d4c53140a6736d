"""Random numbers of a block that computes on the samples of all ranks: the same on all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...model.dropout import drops, generator_of, next_seed, random_state, set_random_state, settings_of
from ...ranks.collectives import all_gather_number
from ...ranks.group import TensorParallelGroup


class SharedRandomness:
    """Lets ranks draw the same numbers in a module that computes on the samples of all; outside, each draws its own."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.own: Tensor | None = None
        """The state of this rank, while it draws from the shared one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandomness:
        return type(self)(self.group)

    def attach(self, module: nn.Module) -> None:
        """Draw from the shared state from the start of `module` to its end, also if it raises."""
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.leave, always_call=True)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Before the module: if it drops anything, use the first rank's next number as the seed (one all-gather)."""
        self.leave()
        if module.training and any(drops(inner, settings_of(inner)) for inner in module.modules()):
            device, process_group = self.group.device, self.group.process_group
            assert process_group is not None
            seeds = all_gather_number(next_seed(device), process_group, device)
            self.own = random_state(device)
            generator_of(device).manual_seed(seeds[0])

    def leave(self, *_: Any) -> None:
        """Switch back to the state of this rank."""
        if self.own is not None:
            set_random_state(self.group.device, self.own)
            self.own = None
