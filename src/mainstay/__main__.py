"""`python -m mainstay` is the `mainstay` command."""

from mainstay.cli import main

if __name__ == "__main__":
    main()
