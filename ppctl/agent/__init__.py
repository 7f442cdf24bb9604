"""One agent per host for the ranks of several: torch's elastic agent, with ppctl's processes, proofs and reasons.

`ppctl node` becomes `job`, and SLURM's jobs and pods start it: this host's agent (`node`) lives with the others that it
meets (`rendezvous`, `lives`), on fewer hosts by a plan for these (`smaller`).
"""
