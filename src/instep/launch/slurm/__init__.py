"""SLURM: the batch script of a training, and the conversation with sbatch, squeue and scancel."""
