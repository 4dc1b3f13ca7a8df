"""Trackers: readers of rank 0's events that send a run's numbers elsewhere, each in a process of its own; no torch.

[Note: Trackers]
`launch/tracking.py` starts one process per tracker (`process.py`), which follows the event log like any reader. So a
library that fails, hangs or ends its process touches neither the training nor another tracker, and what it prints goes
to a file. A process of a tracker outlives a launcher that is killed for as long as it takes to send what is in the log.

`rows.py` turns events into rows, one a step, and decides which are new. A step that a restart made again replaces the
earlier one if that was not sent yet, or if the tracker can take it back (csv, tensorboard); what only appends (wandb,
mlflow, trackio) keeps the one that was sent. Where a tracker continues is asked of its own store (`Tracker.sent`), so
that a kill between sending and noting it neither loses a step nor sends it twice.
"""
