"""The interpreter that executes a schedule on one rank."""
