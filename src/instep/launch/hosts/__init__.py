"""Several machines over ssh: look at them, start an agent on each, pass words and signals, leave nothing behind.

    plan.py      what to do: pure
    ssh.py       the local side: one ssh a host
    look.py      the local side of looking at the hosts before anything starts
    survey.py    runs on a host: says what is there
    guard.py     runs on a host: starts the agent, and ends it when the command that asked for it is gone

No torch: a host is looked at in a fraction of a second.
"""
