"""Search for hyper-parameters: a study of Optuna, whose trials are ordinary trainings.

Ranks: none; this is the process that launches the trials.
"""
