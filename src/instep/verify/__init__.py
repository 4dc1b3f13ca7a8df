"""Parity of runs: the same training at several numbers of processes, disturbed on purpose, and compared.

Room: launches trainings and reads what they left; parses no command line and prints nothing.
"""
