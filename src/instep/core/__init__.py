"""Values only: specs, plans, topology, errors.

Room: no torch, no environment, no files, no processes.
"""
