"""The interpreter that executes a schedule on one rank.

interpreter  run_schedule: a schedule, stage programs and a communicator in, one step out
stage        the execution of one stage; pair_runner: of a forward and a backward side by side
engine_error the error of an action, with its place in the schedule
recorder     stamps of actions
pace         how far the host may run ahead of its GPU
dry_pass     runs the kernels and takes the memory of a step before the first message
"""
