"""Parity of runs: the same training at several numbers of processes, disturbed by faults, and compared.

Launches trainings and reads their files; parses no command line and prints nothing.
"""
