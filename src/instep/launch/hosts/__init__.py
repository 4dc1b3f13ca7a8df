"""Several nodes over ssh (`--hosts`): check them, start a launcher on each, relay output and signals, clean up.

    plan.py         options, addresses and the exit code: pure
    preflight.py    the check of all hosts before anything starts, both sides of it
    ssh.py          the local side: one ssh per host
    supervisor.py   runs on a host: starts the launcher, and ends it when the local command is gone

Nothing here imports torch: the check of a host takes a fraction of a second.
"""
