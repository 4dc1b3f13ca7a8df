"""Guard: what is stuck, slow or drifting is named."""
