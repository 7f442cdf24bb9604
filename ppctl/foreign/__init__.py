"""Causal language models of transformers, whose own code runs on every stage of a pipeline (decision 44)."""
