"""Predictions: what a Task returned as columns, the ranks' parts of them on disk, and the files that they become."""
