"""The layers of a decoder, their parameters, and which of them are recomputed. Torch-free.

layers           layers of a stage, what it recomputes and what it leaves to the host
parameters       one table with a row (rows, with the part of it that a rank holds) for every
                 parameter; adapters has the rows of LoRA
canonical_names  rows by their names in the whole model
foreign_model    rows, names and measured costs of models of transformers
expert_reach     how far a token's experts lie apart, and in which runs they are summed
matrix_owners    which rank owns which matrix (decision 67)
"""
