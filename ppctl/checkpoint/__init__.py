"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the model.

boxes, parts       which part of a tensor; who holds and who writes it; shards: with its values, and copied
manifest, state    what is in all files, and what a checkpoint has beside tensors
saver              the order of a save, at once or beside training (decision 50)
disk               its work on the disk, without torch; writer: the process of a node that does it
local_copy         copies in memory that outlive the process (decision 51); local_copies: on all hosts
reading            loading, one tensor at a time; chunks: each proved before it is used; arrays: without torch
verification       what is wrong with a checkpoint, and why it does not fit a run
agreement          one result or one error for all ranks
step_parity        gradients that runs keep of a step, and where two runs differ (decision 58)
"""
