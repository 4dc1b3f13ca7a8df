"""Pipeline parallelism: a model's layers are split into consecutive stages, each on another rank.

    layers.py       a model as a sequence of layers, named by the Task
    profile.py      what each layer costs, and where the sequence is split into stages
    ownership.py    the modules and tensors that a stage owns; a rank drops the others
    activations.py  what stages send to each other
    schedule.py     PyTorch's stages and schedules, run on instep's microbatches
    stages.py       this rank's stages, in training and in evaluation
    strategy.py     the strategy `pipeline`, and its reducer

Communicates through torch.distributed.pipelining and World.
"""
