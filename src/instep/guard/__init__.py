"""Name what hangs, straggles or diverges.

The modules about hangs read what the kernel knows of processes and ask them for their stacks. They call no collective:
they are needed when collectives no longer answer.
"""
