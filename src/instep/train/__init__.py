"""Training: the Task, the loop, the step, the result.

It uses every layer below it; it parses no command line and prints nothing.
"""
