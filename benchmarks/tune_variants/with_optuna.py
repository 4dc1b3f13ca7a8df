"""Optuna around a DDP training, as people write it by hand: with_optuna.py ROOT TRIALS EPOCHS NOTES.

The study stays in this process. Each trial starts two processes; rank 0 sends its accuracy after each epoch, and all
ranks agree on what the pruner says.
"""

import gc
import multiprocessing
import os
import socket
import sys

import optuna
import torch
import torch.distributed as dist
from training import note, train

WORLD_SIZE = 2


def main(root, trials, epochs, notes):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)
    )
    study.optimize(lambda trial: objective(trial, root, epochs, notes), n_trials=trials)


def objective(trial, root, epochs, notes):
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    hidden = trial.suggest_categorical("hidden", [64, 128, 256])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=rank_main, args=(rank, port, root, epochs, lr, hidden, theirs if rank == 0 else None))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    pruned, accuracy = False, 0.0
    for epoch in range(epochs):
        accuracy = ours.recv()
        note(notes, trial.number, epoch, accuracy)
        trial.report(accuracy, epoch)
        pruned = trial.should_prune() and epoch < epochs - 1
        ours.send(pruned)
        if pruned:
            break
    for rank in ranks:
        rank.join()
    if pruned:
        raise optuna.TrialPruned
    return accuracy


def rank_main(rank, port, root, epochs, lr, hidden, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)

    def report(_epoch, accuracy):
        stops = torch.zeros(1)
        if pipe is not None:
            pipe.send(accuracy)
            stops += pipe.recv()
        dist.broadcast(stops, 0)
        return bool(stops)

    train(root, epochs, lr, hidden, report)
    gc.collect()  # before the group goes: a gloo thread that outlives it aborts the interpreter now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
