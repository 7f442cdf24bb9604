"""Receive buffers are used again by later calls of other kinds."""

from __future__ import annotations

import torch

from ppctl.comm.buffers import MessageSpec


def test_a_buffer_of_an_evaluation_in_inference_mode_serves_a_step() -> None:
    with torch.inference_mode():
        (buffer,) = MessageSpec.of([torch.empty(2)]).make(torch.device("cpu"))
    (buffer.requires_grad_() * 2).sum().backward()
    assert buffer.grad is not None
