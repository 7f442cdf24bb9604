"""Weights that come from, or go to, other programs' formats, one tensor at a time.

convert            Hugging Face directories, with safetensors_reader, safetensors_writer and companion_files
from_dcp, to_dcp   torch's distributed checkpoints (decision 52), read by dcp_reader
average            the mean of several checkpoints
"""
