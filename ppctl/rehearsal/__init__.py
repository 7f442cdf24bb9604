"""A rank of the real job at full size on this machine: its own code on tensors without values (`ppctl rehearse`).

`rank` is the program; `ledger` counts what a GPU would do, `fused_kernels` are those that it would take, `parts`
stand in for the other ranks, the data and the initial weights.
"""
