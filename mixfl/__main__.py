"""`python -m mixfl` is the command `mixfl`."""

from mixfl.cli import main

if __name__ == "__main__":
    main()
