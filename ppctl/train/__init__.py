"""The training loop and what one step needs.

loop, session      the loop; what one rank holds
step               the order of a step; programs: its stages with the loss
figures            a step's metrics, from the ranks' reports (rank_reports); metrics writes them
summed_weights     with which ranks gradients and norms are summed; grad_norm
precision          weights and their masters; sharded: divided over replicas; loss_scale
optimizer, muon    AdamW and Muon (decisions 61 and 67)
replica_check      compares copies of parameters; router_balance: losses and biases of routers
evaluate, generate evaluation, and text from the trained model
snapshot           the state that a checkpoint saves; saving: when; local_start: a start from memory
step_tracer, kept_gradients, torch_profile    what is recorded of chosen steps; measured_costs: a profile
"""
