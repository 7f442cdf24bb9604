"""Pipeline-parallel training of language models from one config."""

__version__ = "0.1.0"
