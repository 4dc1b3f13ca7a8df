"""Checkpoints and the run directory: a checkpoint is complete and verified, or it does not exist.

Loading one executes no code: the files are safetensors and JSON. This package knows nothing of the parts of a
checkpoint's state but `MODEL`, which holds the weights: `train` decides which parts there are.
"""
