"""Model families in their published form: config.json, names of tensors, directories of safetensors. Torch-free.

family_table    one row per family, with its names of tensors; conversions: how its fields become ppctl's keys
config_json     reads and writes config.json; directory finds it and its weights
megatron_names  Megatron-core's names of tensors
safetensors     headers of files
"""
