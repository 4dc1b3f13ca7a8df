"""The fast lane: processes of one machine speak through shared memory instead of sockets.

Room: part of `world`. Knows processes, memory and tensors; no process group, no environment.

    engine       the innermost loops, compiled
    semaphores   how one process tells another that its data is there
    meetings     come, and see who has come
    block        the memory that they share
    peers        who else is on this lane, and whether they still live
    reduction    what is computed from the ranks' numbers, and in which order
    lane         the collectives, chunk by chunk
"""
