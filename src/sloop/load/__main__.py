"""`python -m sloop.load FOLDER`: the sending process; internal, started by `run_load`."""

import sys
from pathlib import Path

from sloop.load.sender import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
