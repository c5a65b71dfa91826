"""`python -m tfgpipe` is the program `tfgpipe`."""

import sys

from tfgpipe.commands import main

if __name__ == "__main__":
    sys.exit(main.main())
