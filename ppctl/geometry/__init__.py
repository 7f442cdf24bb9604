"""What a decoder is made of: its layers, their parameters, and what of them is recomputed. Torch-free."""
