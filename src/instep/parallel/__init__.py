"""Strategies that distribute a model over ranks, and the layers whose output would depend on the split.

Communicates through World only, except for torch.distributed.pipelining, FSDP2 and DTensor.
"""
