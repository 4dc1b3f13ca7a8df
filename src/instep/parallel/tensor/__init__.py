"""Tensor parallelism: each layer's weights are sharded over the ranks of a group, which compute on the same rows."""
