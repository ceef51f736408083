"""Where is the extension module? Built when needed, and loaded once."""

from ..build import load

native = load()
