"""States of random number generators, on any device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of `device`, as a CPU tensor."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the default generator of `device` to a state from `random_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the default generators of Python, numpy, torch's CPU and `device`."""
    return random.getstate(), np.random.get_state(), random_state(torch.device("cpu")), random_state(device)


def set_random_states(device: torch.device, states: tuple[Any, ...]) -> None:
    """Set the default generators to the states from `random_states`."""
    python, numpy, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    set_random_state(torch.device("cpu"), cpu)
    set_random_state(device, own)
