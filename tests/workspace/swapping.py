"""A program that swaps a folder for a link and back, as fast as it can, until it is killed: `swapping.py folder`."""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    os.chdir(folder)
    print("at work", flush=True)
    while True:
        os.rename("sub", "real")
        os.rename("way", "sub")
        os.rename("sub", "way")
        os.rename("real", "sub")


if __name__ == "__main__":
    main(sys.argv[1])
