"""Processes: who starts them, who watches them, how they end."""
