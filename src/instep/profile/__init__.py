"""What a rank does in a few steps: torch's profiler, the trace of all ranks, its summary; what holds the memory."""
