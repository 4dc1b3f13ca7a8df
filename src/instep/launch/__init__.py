"""Start ranks, watch them, and report what failed first.

Importing this package imports nothing: help and wrong options are answered without torch.
"""
