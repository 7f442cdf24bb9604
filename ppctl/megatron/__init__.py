"""Megatron-core's functions: one step of training or evaluation through a pipeline, under Megatron's own names.

Every function makes a schedule and this rank's stages, and runs them with `run_schedule`, as `ppctl train` does, and
with `P2PCommunicator` for the messages; `adopt` puts functions and communicator in Megatron's places.
"""

from typing import Any

import ppctl


def __getattr__(name: str) -> Any:
    """A public name of this package: `ppctl` has all of them."""
    return getattr(ppctl, name)
