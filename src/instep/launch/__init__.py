"""Start ranks, watch over them, and say what failed first.

Room: the environment and processes; torch only through elastic and the thread count. Importing this package
imports nothing: preload.py must be reached without torch.
"""
