"""Print how many ancestors of this process run the command itself, and what a forkserver of its own returns."""

import multiprocessing
import os

import psutil


def square(number: int) -> int:
    return number * number


if __name__ == "__main__":
    commands = [" ".join(process.cmdline()) for process in psutil.Process(os.getpid()).parents()]
    print("ancestors", sum("instep run" in command for command in commands))
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print("squares", pool.map(square, [3]))
