"""Whether a job hangs (`limits`), which rank waits for which, and which rank is the cause (`verdict`).

From the ranks' states and the plan alone: no processes, clocks or files.
"""
