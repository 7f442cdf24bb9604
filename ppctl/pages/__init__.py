"""The page behind every error code."""
