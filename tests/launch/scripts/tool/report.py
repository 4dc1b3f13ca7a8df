import sys

from .near import WORD

if __name__ == "__main__":
    print(WORD, __spec__.name, sys.argv[1:])
