"""The layers of a decoder, their parameters, and which of them are recomputed. Torch-free.

layers           layers of a stage, what it recomputes and what it leaves to the host
parameters       one table with a row for every parameter; adapters has the rows of LoRA
rows             a row, and the part of its parameter that a rank holds
canonical_names  rows by their names in the whole model
foreign_model    rows, names and measured costs of transformers models
expert_reach     how far a token's experts lie apart, and in which runs they are summed
matrix_owners    which rank owns which matrix (decision 67)
"""
