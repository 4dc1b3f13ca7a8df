"""Values only: specs, plans, topology, errors. No torch, no environment, no files, no processes."""
