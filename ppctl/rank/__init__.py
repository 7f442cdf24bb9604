"""What one rank does, from its start to its end."""
