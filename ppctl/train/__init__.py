"""The training loop and what one step needs."""
