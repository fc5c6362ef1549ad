"""Requests without end, from a process of its own: threads beside a trainer would wait for its interpreter.

    python -m loraflow.bench.streams '{"url": …, "streams": 64, "vocabulary": 1000, "tokens": [128, 256]}'

Each line of the standard input is a JSON list of what requests ask for from then on, in turn: ``[model, more]``, with
``more`` fields of the body. It is answered with the number of requests that failed since the line before. The line
``null`` is answered with when the tokens of a few streams came, one list per request, since it was asked last.

Requests are token ids in, token ids out (vLLM's ``/inference/v1/generate``) where the server was started with
``--enable-scale-out``: turning tokens into text is no part of what is measured, and with hundreds of streams it takes
much of a processor. Elsewhere they are ``/v1/completions``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import requests

from loraflow.access import secret
from loraflow.errors import LoraflowError
from loraflow.http_errors import HTTPFailure
from loraflow.server import VLLMServer

__all__ = ["Asked", "Streams"]

Asked = Sequence[tuple[str, Mapping[str, Any]]]
"""What requests ask for, in turn: the ``model``, and more fields of the body."""

_TOKENS, _TEXT = "/inference/v1/generate", "/v1/completions"
_NOT_THERE = (403, 404)
_PROMPT_TOKENS = 16
_WATCHED = 4
_LONGEST = 120.0


class Streams:
    """A process that keeps requests under way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def to(cls, url: str, *, streams: int, vocabulary: int, tokens: tuple[int, int]) -> Iterator[Streams]:
        """Keep ``streams`` requests under way inside, from the first `ask` on; at the end they are broken off.

        Args:
            url: The server.
            streams: Requests at once.
            vocabulary: Prompts are random ids below it, so that no prefix is cached.
            tokens: Each request asks for a number of tokens in this range, so that the streams do not beat in time.
        """
        given = json.dumps({"url": url, "streams": streams, "vocabulary": vocabulary, "tokens": list(tokens)})
        command = [sys.executable, "-m", "loraflow.bench.streams", given]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def ask(self, asked: Asked) -> int:
        """What requests ask for from now on; how many failed since this was called last.

        Raises:
            LoraflowError: The process has ended.
        """
        return int(self._tell([[model, dict(more)] for model, more in asked]))

    def seen(self) -> list[list[float]]:
        """When tokens of a few streams came, on the performance counter: a list per request begun since this was asked.

        Raises:
            LoraflowError: The process has ended.
        """
        return [list(map(float, times)) for times in self._tell(None)]

    def _tell(self, line: Any) -> Any:
        given, told = self._process.stdin, self._process.stdout
        assert given is not None  # noqa: S101 - made with both
        assert told is not None  # noqa: S101
        try:
            given.write(json.dumps(line) + "\n")
            given.flush()
            return json.loads(told.readline())
        except (OSError, ValueError) as error:
            raise LoraflowError(
                "the process that sends requests has ended", hint="its error is printed above"
            ) from error


class _Load:
    """The process's own side."""

    def __init__(self, url: str, streams: int, vocabulary: int, tokens: tuple[int, int]) -> None:
        self._url, self._vocabulary, self._tokens = url, vocabulary, tokens
        self._asked: list[tuple[str, dict[str, Any]]] = []
        self._route = _TEXT
        self._turn = count()
        self._failed = [0] * streams
        self._seen: deque[list[float]] = deque(maxlen=100 * _WATCHED)
        self._threads = [threading.Thread(target=self._stream, args=(n,), daemon=True) for n in range(streams)]

    def run(self, lines: Iterator[str]) -> None:
        told = 0
        for line in lines:
            if (told_now := json.loads(line)) is None:
                print(json.dumps(self._take_seen()), flush=True)
                continue
            first = not self._asked
            self._asked = [(str(model), dict(more)) for model, more in told_now]
            if first:
                self._route = self._find_route()
            for thread in self._threads if first else ():
                thread.start()
            failed = sum(self._failed)
            print(failed - told, flush=True)
            told = failed

    def _take_seen(self) -> list[list[float]]:
        taken = [[round(at, 5) for at in times] for times in list(self._seen)]
        self._seen.clear()
        return taken

    def _find_route(self) -> str:
        model, more = self._asked[0]
        try:
            with VLLMServer(self._url) as server:
                server.request("POST", _TOKENS, json=_body(_TOKENS, model, [3], 1, more), timeout=_LONGEST)
        except HTTPFailure as error:
            if error.status in _NOT_THERE:
                return _TEXT
        except LoraflowError:
            pass  # the streams will count it
        return _TOKENS

    def _stream(self, number: int) -> None:
        draw = random.Random(number)  # noqa: S311 - no secret
        server, session = VLLMServer(self._url), requests.Session()  # a connection of its own
        while True:
            asked = self._asked
            model, more = asked[next(self._turn) % len(asked)]
            prompt = [draw.randrange(3, self._vocabulary) for _ in range(_PROMPT_TOKENS)]
            body = _body(self._route, model, prompt, draw.randint(*self._tokens), more)
            try:
                if number < _WATCHED and self._route == _TOKENS:
                    self._watch(session, body)
                else:
                    server.request("POST", self._route, json=body, timeout=_LONGEST)
            except (LoraflowError, OSError):
                self._failed[number] += 1
                time.sleep(0.1)

    def _watch(self, session: requests.Session, body: Mapping[str, Any]) -> None:
        times: list[float] = []
        self._seen.append(times)
        key = secret(None, "VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        sent = {**body, "stream": True}
        with session.post(self._url + self._route, json=sent, headers=headers, stream=True, timeout=_LONGEST) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_content(None):
                times += [time.perf_counter()] * chunk.count(b"data: {")  # an event per token


def _body(route: str, model: str, prompt: Sequence[int], tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    if route == _TEXT:
        return {"model": model, "prompt": list(prompt), **sampling, **more}
    return {"model": model, "token_ids": list(prompt), "sampling_params": {**sampling, "detokenize": False}, **more}


def main() -> None:
    """See the module."""
    given = json.loads(sys.argv[1])
    low, high = given["tokens"]
    _Load(given["url"], given["streams"], given["vocabulary"], (low, high)).run(iter(sys.stdin.readline, ""))


if __name__ == "__main__":
    main()
