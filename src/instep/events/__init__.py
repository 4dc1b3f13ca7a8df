"""The log of a run: schema, write, read. One JSON object per line, append-only, one file per rank; no torch."""
