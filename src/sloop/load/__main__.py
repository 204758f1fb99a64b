"""`python -m sloop.load FOLDER`: the sending process, started by `run_load`; not for people."""

import sys
from pathlib import Path

from sloop.load.sender import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
