"""Closed forms: parameters, FLOPs and bytes of the parts of a model.

parameter_counts     per layer, stage and model, and of Muon's owners; state: bytes of weights, gradients, optimizer
layer_parts          what a layer keeps for its backward; operands, context_parallelism
working_memory       what a layer has in memory only while it runs
activations          both for a stage, also of a transformers model, and what waits on the host
flops, times         FLOPs, and seconds on a device preset
traffic              what a rank sends in a microbatch; step_traffic: once a step
setting              the sizes on which all of these depend
"""
