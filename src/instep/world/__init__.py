"""Who am I, the process group, every collective, seeds.

Room: the only one that speaks to the other ranks; with launch, the only one that reads the environment.
"""
