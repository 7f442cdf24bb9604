"""The page of every error code, and the pages that translate other systems' names."""
