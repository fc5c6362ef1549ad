"""`loraflow demo`: the whole thing on a fresh machine."""
