"""What the commands of ``loraflow`` do; `loraflow.cli` only parses their arguments."""
