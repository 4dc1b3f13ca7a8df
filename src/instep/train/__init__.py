"""Training: the Task, the loop, the step, the result.

Room: everything below is at its service; it parses no command line and prints nothing.
"""
