"""A rank of the real job at full size on this machine: its own code on meta tensors (`ppctl rehearse`).

`rank` is the program; `ledger` counts a GPU's operations and bytes, `stand_ins` replace the other ranks, the data, the
initial weights and the kernels that a GPU fuses.
"""
