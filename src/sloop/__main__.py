"""`python -m sloop`, the same as the command `sloop`."""

from sloop.cli import main

if __name__ == "__main__":
    main()
