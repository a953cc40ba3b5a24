"""`python -m mainstay` is the `mainstay` command."""

from mainstay.cli.main import main

if __name__ == "__main__":
    main()
