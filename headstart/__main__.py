"""`python -m headstart`."""

import sys

from headstart.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
