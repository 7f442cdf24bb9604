"""Closed forms: parameters, FLOPs and bytes of the parts of a model.

parameters, state    number of parameters; bytes of weights, gradients and optimizer
layer_parts          what a layer keeps for its backward; operands, context, offloading
working_memory       what a layer has in memory besides, while it runs
activations          both for a stage; owned_matrices: for Muon's owners
foreign              both for layers of transformers
flops, times         FLOPs, and seconds on a device preset
traffic              what a rank sends in a microbatch; step_traffic: once a step
setting              the sizes on which all of this depends
layout_search        the search for layouts, with layout_scores
"""
