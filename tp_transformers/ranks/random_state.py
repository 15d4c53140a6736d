"""States of random number generators, of any device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
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


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the default generators of Python, numpy, torch's CPU and `device`."""
    return random.getstate(), np.random.get_state(), random_state(torch.device("cpu")), random_state(device)


def set_random_states(device: torch.device, states: tuple[Any, ...]) -> None:
    """Give the default generators the states that `random_states` returned."""
    python, numpy, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    set_random_state(torch.device("cpu"), cpu)
    set_random_state(device, own)
