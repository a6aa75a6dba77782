"""``python -m shardconv``."""

from .cli import main

main()
