"""This machine: its files, its processes and its devices.

files          never half-written, read up to a limit, locked
private_files  files that no other user of the machine can reach
processes      how processes are started, and whether they live or are stopped
devices        which device the ranks of a machine use, and the backends of their groups
accelerators   device presets: rates, bandwidths and the sizes of fast-link domains
"""
