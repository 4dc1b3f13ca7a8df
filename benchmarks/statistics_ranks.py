"""The ranks of statistics_fit.py, started by torchrun: statistics_ranks.py FOLDER ROUNDS."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn import preprocessing

import instep
from instep.train.preprocessing import fitting_with
from instep.world.world import World, place_here

WAYS = ("1 process", "2 processes", "scikit-learn")
SCALERS = ("StandardScaler", "MinMaxScaler", "RobustScaler")


def main(folder, rounds):
    torch.set_num_threads(1)
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted(Path(folder).glob("*.npy"))}
    with World.join(place_here(), comm="gloo") as world:
        times = {}
        for number in range(rounds + 1):  # the first one is not counted: pages are read, modules imported
            for name, array in arrays.items():
                for scaler in SCALERS:
                    for way in WAYS:
                        seconds = timed(world, way, scaler, array)
                        if number:
                            times.setdefault(f"{scaler} {name}", {}).setdefault(way, []).append(seconds)
        if world.is_main:
            print(json.dumps(times))


def timed(world, way, scaler, array):
    """Time a fit until all ranks have its result; where one process fits, the other one sleeps in the barrier.

    Return the seconds that passed, and the CPU seconds of the rank that needed most: what would pass on idle cores.
    """
    world.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    if way == "2 processes":
        with fitting_with(world):
            getattr(instep.data, scaler)().fit(array)
    elif world.is_main:
        (getattr(instep.data, scaler) if way == "1 process" else getattr(preprocessing, scaler))().fit(array)
    cpu = time.process_time() - cpu
    world.barrier()
    return time.perf_counter() - begun, max(world.all_gather_object(cpu))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
