"""Decoder blocks, and stages built from them."""
