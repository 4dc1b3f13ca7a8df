"""A script that uses multiprocessing in every way: nothing here knows of instep."""

import argparse
import atexit
import multiprocessing
import os

import beside
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def square(x):
    return x * x


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1)
    n = parser.parse_args().n
    multiprocessing.set_start_method("spawn")  # allowed once, and nobody may have been before us
    assert multiprocessing.current_process().name == "MainProcess"
    atexit.register(print, "handlers at exit run")

    dist.init_process_group("gloo")
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [n, 3]))
    data = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1, multiprocessing_context="fork")
    total = torch.stack([x.sum() for (x,) in data]).sum()
    dist.all_reduce(total)
    print("total", total.item(), beside.WORD, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"])
