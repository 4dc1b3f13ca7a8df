"""Hangs: where every rank is, and which of them the others wait for.

Room: reads the kernel's accounts of processes and asks them for their stacks; speaks with no rank and calls no
collective, for it is needed when those no longer answer.
"""
