"""Megatron's communicator under its home of before: it lives in `ppctl.megatron.p2p_communication`."""

from ppctl.megatron.exchange import is_single_shape
from ppctl.megatron.p2p_communication import P2PCommunicator, Shape

__all__ = ["P2PCommunicator", "Shape", "is_single_shape"]
