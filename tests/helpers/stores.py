"""The store of a group of test ranks, as ranks of a run have it."""

import torch.distributed as dist

from ppctl.reach.store import SealedStore

SECRET = bytes(range(32))


def sealed_store(secret=SECRET, start="1"):
    return SealedStore(dist.distributed_c10d._get_default_store(), secret, start)
