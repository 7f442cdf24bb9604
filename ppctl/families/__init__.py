"""Model families in their published form: config.json, names of tensors, directories of safetensors. Torch-free.

table, conversions  one row per family, and how its fields become ppctl's keys
config_json         reads and writes config.json; directory finds it and its weights
names               names of tensors; megatron_names: Megatron-core's
safetensors         headers of files
"""
