"""Model families as the world stores them: config.json, names of tensors, directories of safetensors. Torch-free."""
