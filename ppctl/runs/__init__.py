"""Runs on disk: their directories, their starts, their checkpoints, and how they are found.

rundir             the files of a run directory
run_starts         the starts of one run: its lock, and what is kept of earlier ones
heartbeat          a rank's state in shared memory, and what a node publishes of its ranks
checkpoint_folder  a directory of checkpoints, and which one a start reads (torch-free)
finding            all runs, the one that a person means, and the checkpoint to continue from
"""
