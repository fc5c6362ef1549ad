"""Run by Axolotl's interpreter: its own validation of many configs, one JSON answer each.

Each is validated with the plugins that it names; ``retained…`` also meets those of the config before it. Reads
``{name: config}`` from stdin; writes ``{name: {"error": text} | {"config": resolved}}`` and what was imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    answers: dict[str, Any] = {}
    for name, config in json.load(sys.stdin).items():
        if not name.startswith("retained"):
            PluginManager.get_instance().plugins.clear()
        cfg = DictDefault(config)
        try:
            prepare_plugins(cfg)
            answers[name] = {"config": validate_config(cfg).to_dict()}
        except ValueError as error:  # pydantic's ValidationError is one
            answers[name] = {"error": str(error)}
        answers[name]["imported"] = sorted(module for module in sys.modules if module.startswith("loraflow"))
    sys.stdout.write("\n===\n" + json.dumps(answers, default=str))


if __name__ == "__main__":
    main()
