"""The training loop and what one step needs.

loop               step after step, and evaluations; callback: what follows a run, at which places of the run
session            one rank of a run; it is made of a rank_model (what it computes) and a replica (what it trains)
step               the order of a step; programs: its stages with the objective
trained_weights    weights and their masters, whole or divided over replicas; mixed_precision: autocast, loss scale
grad_norm          the gradients' norm; optimizer: AdamW and Muon (decisions 61 and 67)
kernel_check       a reference for kernels that are not ppctl's
reports            a step's numbers: the ranks' reports, and the figures computed from them
generate           text from the trained model
snapshot           the state that a checkpoint saves
metrics, saving, recordings, replica_check    callbacks: where records are written, checkpoints and starts from them,
                   what is recorded of chosen steps, comparisons of parameters' copies; own_callbacks: a person's own
"""
