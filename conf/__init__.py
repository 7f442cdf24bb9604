"""The Hydra config root, shipped as ppctl._conf."""
