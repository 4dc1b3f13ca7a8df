"""The lane: ranks of one node communicate through shared memory instead of sockets.

Knows processes, memory and tensors; no process group and no environment variables.

    engine       the innermost loops, compiled
    barrier      semaphores in shared memory, and the barrier made of them
    block        the shared memory
    peers        the other ranks: waiting for them, and naming the one that is lost
    reduction    what is computed from the ranks' elements, and in which order
    lane         the collectives, chunk by chunk
    rendezvous   which ranks share a node, and how they set a lane up
"""
