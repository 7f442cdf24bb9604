"""Weights that come from, or go to, Hugging Face's model directories, one tensor at a time."""
