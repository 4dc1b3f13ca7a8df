"""The process's place in the job, its device, the process group and its collectives, seeds.

With `parallel` and `checkpoint`, this package communicates with the other ranks during training (`launch` only to start
them); with `launch`, it reads the environment.
"""
