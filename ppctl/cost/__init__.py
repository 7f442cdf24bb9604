"""Closed forms: parameters, FLOPs and bytes of the parts of a model."""
