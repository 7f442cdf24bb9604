"""One agent per host for a run on several: torch's elastic agent, with ppctl's processes, proofs and reasons.

`ppctl node` becomes the program `job`, which SLURM jobs and pods start: it runs this host's agent (`node`), which meets
the others (`rendezvous`, `lives`). If hosts are missing, `smaller` plans for fewer, or `requeue` starts the job again.
"""
