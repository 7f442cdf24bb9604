"""Copies and sums across ranks: data-parallel replicas and tied parameters."""
