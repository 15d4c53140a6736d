"""States of random number generators, of any device."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of `device`, on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Give the default generator of `device` a state that `random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
