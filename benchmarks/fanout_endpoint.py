"""One simulated server of fanout.py: `fanout_endpoint.py PORT LOAD_MS VERIFY_MS`. The standard library alone."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

LOGPROB = -1.0


class Simulated(BaseHTTPRequestHandler):
    """vLLM's routes, as far as a sync uses them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    names: ClassVar[dict[str, str]] = {}
    load_seconds = verify_seconds = 0.0

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.path == "/v1/load_lora_adapter":
            time.sleep(self.load_seconds)
            self.names[body["lora_name"]] = body["lora_path"]
        elif self.path == "/v1/unload_lora_adapter":
            self.names.pop(body["lora_name"], None)
        elif self.path == "/v1/completions":
            time.sleep(self.verify_seconds)
        answer = json.dumps(self._answer(body)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815 - the name that http.server looks for

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/v1/completions":
            rows = [None, *({str(token): {"logprob": LOGPROB}} for token in body["prompt"][1:])]
            return {"model": body["model"], "choices": [{"prompt_logprobs": rows}]}
        adapters = [{"id": name, "root": path, "parent": "base"} for name, path in dict(self.names).items()]
        return {
            "version": "0.32.0",
            "paths": {},
            "data": [{"id": "base", "root": "base", "parent": None, "max_model_len": 256}, *adapters],
        }

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    port, load_ms, verify_ms = sys.argv[1:]
    Simulated.load_seconds, Simulated.verify_seconds = float(load_ms) / 1e3, float(verify_ms) / 1e3
    ThreadingHTTPServer(("127.0.0.1", int(port)), Simulated).serve_forever()
