"""Guard: what is stuck, slow or drifting is named.

Room: files about hangs read the kernel's accounts of processes and ask them for their stacks; they speak with no rank
and call no collective, for they are needed when those no longer answer.
"""
