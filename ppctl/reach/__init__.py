"""Whether the hosts of a job reach each other, tried before the first step."""
