"""`python -m afluente` is the command `afluente`."""

from afluente.cli import main

if __name__ == "__main__":
    main()
