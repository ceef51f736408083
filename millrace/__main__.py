"""What does `python -m millrace` do? The same as the `millrace` command."""

import sys

from millrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
