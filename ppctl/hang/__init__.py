"""When a job hangs, and whom all others wait for: records and plan in, culprit out."""
