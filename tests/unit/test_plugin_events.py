"""One event is one line, which people and programs read."""

from __future__ import annotations

import logging

import pytest

from loraflow_server.events import log_event


def test_an_event_is_one_line_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.loraflow.tested")
    with caplog.at_level(logging.INFO, logger.name):
        log_event(logger, logging.INFO, "adapter_loaded", name="run-v3", id=7, ms=12.34567, path="/a b/run")
        log_event(logger, logging.WARNING, "refused", reason='no\n2026 INFO loraflow: adapter_loaded name="x"')
    first, second = caplog.records
    assert first.getMessage() == 'loraflow: adapter_loaded name=run-v3 id=7 ms=12.346 path="/a b/run"'
    assert first.loraflow == {"event": "adapter_loaded", "name": "run-v3", "id": 7, "ms": 12.34567, "path": "/a b/run"}
    assert second.levelno == logging.WARNING
    assert "\n" not in second.getMessage()
    assert second.getMessage().startswith('loraflow: refused reason="no\\n2026')
