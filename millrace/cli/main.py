"""What does `millrace` on the command line do? It reads the arguments and runs one command."""

import argparse
import sys
from collections.abc import Sequence

import millrace


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace", description="Train and run PyTorch models that are larger than device memory."
    )
    parser.add_argument("--version", action="version", version=f"millrace {millrace.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    build_parser().parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
