"""How the speed of a training depends on its number of processes: pure arithmetic on measured times."""
