"""Whose fault it is if a message fails: the other rank's, unless this rank's own device has failed."""

import pytest
import torch
import torch.distributed as dist

from ppctl.comm.channels import DirectEnd, PeerLost, wait_for
from ppctl.comm.communicator import FusedBatch
from ppctl.schedule.action import Channel

CHANNEL, MESSAGE = Channel(0, 1, "F"), (torch.ones(2),)


class Failing:
    """A backend, and a message under way in it, that fail with `error`."""

    def __init__(self, error):
        self.error = error

    def send(self, *_):
        raise self.error

    recv = wait = send


def settle(failing, monkeypatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", failing.send)
    batch = FusedBatch(None)
    batch._ops, batch._channels = [None], [CHANNEL]
    batch.settle()


PLACES = {
    "send": lambda failing, _: DirectEnd(CHANNEL, failing, 1, 0).start_send(MESSAGE),
    "receive": lambda failing, _: DirectEnd(CHANNEL, failing, 1, 0).receive_into(MESSAGE),
    "wait": lambda failing, _: wait_for([failing], CHANNEL),
    "batch": settle,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_of_the_device_beside_a_message_stays_what_it_is(place, monkeypatch):
    for fault in (torch.AcceleratorError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("80 GiB")):
        with pytest.raises(type(fault)) as raised:
            PLACES[place](Failing(fault), monkeypatch)
        assert raised.value is fault
    with pytest.raises(PeerLost, match="Connection closed by peer"):
        PLACES[place](Failing(RuntimeError("Connection closed by peer")), monkeypatch)
