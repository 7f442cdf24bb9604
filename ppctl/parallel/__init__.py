"""Collectives on tensors: what ranks with parts or copies of the same tensors exchange.

axis_groups      a rank's process groups, by the axes along which they go
replicate        sums of gradients over replicas
shard            tensors in equal parts over ranks, or in runs that belong to one rank each
ties             parameters that several stages share
tensor           collectives of tensor and sequence parallelism; tensors made whole from slices
context          attention to sequences that are divided over ranks (decision 42)
all_to_all       exchanges between all ranks of a group; dispatch: rows to experts on other ranks
exchange_counts  how many exchanges have been started along each axis, for the hang detector
"""
