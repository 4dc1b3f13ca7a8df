"""SLURM: the batch script of a training, and calls of sbatch, squeue, scontrol and scancel."""
