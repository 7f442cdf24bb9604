"""A rank under torchrun that fails in its first life: started by test_restarts, it says what it read of the others.

With `early` its last rank fails there before it has come to the store.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ppctl.comm.connections import connections_of
from ppctl.rank.rendezvous import OwnRank, meet
from ppctl.reach.start import join_world

own = OwnRank.from_environment()
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if life == 0 and "early" in sys.argv and own.rank == own.world_size - 1:
    time.sleep(2.0)  # rank 0 has counted this start
    os._exit(1)
time.sleep(2.0 * (life == 1 and own.rank == 0))  # on a restart rank 0 may come last
store = meet(own, timedelta(seconds=60))
if own.rank == 0:
    store.set("job", str(life))
told = store.get("job").decode()
join_world(store, own.rank, own.world_size, "gloo", timedelta(seconds=60))
number = torch.ones(1)
assert dist.group.WORLD is not None
connections_of(dist.group.WORLD).of_all("gloo", "gradients").allreduce([number]).wait()  # type: ignore[attr-defined]
os.write(1, f"life {life} rank {own.rank} read {told} of {int(number)}\n".encode())  # at once: ranks share the pipe
dist.barrier()
os._exit(int(life == 0))
