"""What people look at while a run goes on: readers of its events. Called by cli only; no torch."""
