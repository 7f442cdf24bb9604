"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the model.

boxes              parts of a tensor; tensor_parts: which ranks hold and write a part; shards: its values
manifest           what is in all files; run_state: what a checkpoint has beside tensors
saver              the order of a save, while training waits or beside it (decision 50)
disk               its work on the disk, without torch; writer: the process of a node that does it
local_copy         copies in memory that outlive the process (decision 51); local_copies: on all hosts
reading            loading, one tensor at a time; chunks: each proved before it is used; arrays: without torch
verification       what is wrong with a checkpoint, and why it does not fit a run
rank_agreement     one result or one error for all ranks
step_parity        gradients that runs keep of a step, and where two runs differ (decision 58)
"""
