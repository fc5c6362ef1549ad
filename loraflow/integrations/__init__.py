"""TRL and Axolotl."""
