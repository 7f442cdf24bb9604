"""Decoder blocks, and stages built from them.

stage_model       the protocol that training requires of a stage's module
stage, layer      a stage of a StageSpec, and its layers: attention, feed_forward, router, mtp, norms, rotary, loss
activation        between the products of a feed-forward
linear            every product with a weight; fp8: in 8 bits
kernels           which kernels a device runs; attention and block_attention call them; outside_kernels: those
                  that are not ppctl's
initialize        weights from (seed, canonical name)
split             products whose weights are divided over ranks (decision 41)
draw              the next token, from logits
dropout           draws as functions of positions (decision 40); dropped_attention
recompute         activation recomputation; compile: torch.compile
offload           activations in host memory (decision 43)
packing           documents within a row
"""
