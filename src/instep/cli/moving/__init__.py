"""Move a training script into a Task: read it, rewrite its expressions, write the file. Pure."""
