"""One agent per host for the ranks of several: torch's elastic agent, with ppctl's processes, proofs and reasons.

`ppctl node` becomes `__main__`, which runs this host's agent (`node`) in one life after another (`lives`) with the
agents that it meets (`rendezvous`), on fewer hosts by a plan for these (`smaller`). It is above both paths: it
starts ranks, and imports torch. Decision 96.
"""
