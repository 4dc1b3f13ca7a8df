"""The process's place in the job, its device, the process group and its collectives, seeds.

Process groups are made here, and instep's collectives are methods of `World`; besides, `parallel` communicates through
torch's own DTensor, FSDP and pipelining. The environment is read here and in `launch`.
"""
