"""Search of hyper-parameters, finders.

Launches short trainings in scratch directories; parses no command line and prints nothing.
"""
