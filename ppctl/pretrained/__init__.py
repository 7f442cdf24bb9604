"""Weights that come from, or go to, other programs' formats, one tensor at a time."""
