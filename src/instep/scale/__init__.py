"""Short trainings of one Task at several world sizes, in turns, to measure how its speed depends on the world size.

Launches trainings in scratch directories; parses no command line and prints nothing.
"""
