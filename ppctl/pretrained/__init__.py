"""Weights that come from, or go to, other programs' formats, one tensor at a time.

command            what `ppctl ckpt` starts; the mean of several checkpoints
conversion         what all of them share: a checkpoint of weights alone, the weights of a checkpoint
hugging_face       Hugging Face directories
from_dcp, to_dcp   torch's distributed checkpoints (decision 52)
generate           what `ppctl generate` starts: a model whole in its process
"""
