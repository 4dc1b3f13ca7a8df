"""Checkpoints and the run directory: complete and verified, or not there at all.

Room: the files of a run directory. Loading executes nothing: safetensors and JSON.
"""
