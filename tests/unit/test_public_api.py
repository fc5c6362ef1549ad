"""The public API is complete, and importing it is cheap and brings nothing optional along."""

from __future__ import annotations

import subprocess
import sys

import loraflow


def test_every_exported_name_is_there() -> None:
    for name in loraflow.__all__:
        assert getattr(loraflow, name) is not None
    assert set(loraflow._WHERE) == set(loraflow.__all__) - {"__version__"}


def test_every_error_is_exported() -> None:
    from loraflow import errors

    assert set(errors.__all__) <= set(loraflow.__all__)


def test_import_brings_no_vllm_trl_or_axolotl() -> None:
    code = (
        "import sys, loraflow; [getattr(loraflow, n) for n in loraflow.__all__];"
        "print([m for m in ('vllm', 'trl', 'axolotl') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_bare_import_does_not_wait_for_torch() -> None:
    code = "import sys, loraflow, loraflow.cli; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
