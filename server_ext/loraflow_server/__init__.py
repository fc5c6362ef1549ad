"""loraflow's vLLM side: a plugin that vLLM discovers by itself."""
