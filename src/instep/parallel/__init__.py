"""How a model is spread over ranks: strategies, and the layers whose answer would depend on the split.

Room: torch modules and gradients; speaks to other ranks through World only.
"""
