"""Start ranks, watch them, and report what failed first.

Importing this package imports nothing: preload.py must be reached without torch.
"""
