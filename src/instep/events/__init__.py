"""The log of a run: schema, write, read. One JSON object a line, append-only, one file a rank.

Room: files of `RUN/events` only; no torch.
"""
