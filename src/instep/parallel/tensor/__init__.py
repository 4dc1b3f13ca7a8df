"""Tensor parallelism: each layer's weights are shared by a team of ranks, which compute on the same rows."""
