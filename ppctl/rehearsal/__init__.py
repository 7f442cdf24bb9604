"""A rank of the real job at full size on this machine: its own code on meta tensors (`ppctl rehearse`).

`rank` is the program; `ledger` counts what a GPU would do, `stand_ins` take the places of the other ranks, the data,
the initial weights and the kernels that a GPU fuses.
"""
