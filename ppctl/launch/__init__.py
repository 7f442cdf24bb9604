"""Processes: who starts them, who watches them, how they end.

    planning       from words to a plan, as every command does it
    environment    what started this process
    run_directory  the run directory before its ranks start
    watch          runs a job on this machine: starts, watches and ends its ranks; process: one of them
    outcome        how a job ended
    machine        what this machine has
    weights        the weights that a run starts from; described: models whose code is transformers'
    slurm          SLURM's commands; kubernetes: a cluster's API
    trackers       whether TensorBoard and Weights & Biases can record a run

A SLURM job runs `script` (its text is job.sbatch): on every node `enter` and an agent, then `leave` once. Under
Kubernetes each pod of `kubernetes_objects` runs `pod`, which enters and starts an agent.
"""
