"""What does `python -m headrace` do? The same as the `headrace` command."""

import sys

from headrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
