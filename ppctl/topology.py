"""Ranks are positions of one named grid; groups and peers are its slices.

Knows the parallel sizes and Megatron's rank order. Must not know torch, configs or schedules. No other module does
arithmetic on ranks. Standard library only.
"""
