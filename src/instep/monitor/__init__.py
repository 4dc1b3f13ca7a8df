"""What people look at during a run: readers of its events. Called by cli only; no torch."""
