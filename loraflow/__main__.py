"""``python -m loraflow``."""

from loraflow.cli import main

main()
