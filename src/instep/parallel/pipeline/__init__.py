"""Pipeline parallelism: a model's layers are cut into stages, one after the other, each on a rank of its own.

    chain.py      a model as a chain of layers, from the Task or found by tracing it
    measure.py    what each layer costs, and where the chain may be cut
    holding.py    what of a model a stage holds; the rest of it is let go
    wire.py       what travels between stages
    schedule.py   PyTorch's stages and schedules, with our microbatches
    pipe.py       the pipeline at work, seen from one rank
    reducer.py    gradients: over the copies of a stage, and of weights that stages share
    strategy.py   all of it, as one way to spread a model

Room: torch modules and torch.distributed.pipelining; other than that, speaks to other ranks through World only.
"""
