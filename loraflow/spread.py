"""Spreading requests over proven servers, and repeating on another server what failed on one.

Repeating a generation is safe: it changes nothing on a server, and a policy's name means one content on every server
that has proven it (rule 1). A server that fails is reported, so that it can be set aside, and its share goes to others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loraflow.errors import LoraflowError, SyncTimeout, VerifyError
from loraflow.server import BadAnswer, HTTPFailure, Unreachable, VLLMServer

__all__ = ["is_servers_fault", "shares", "spread"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_GONE = 404  # the name is not known there: it restarted
_SERVER_ERROR = 500


def is_servers_fault(error: LoraflowError) -> bool:
    """Whether another server may answer what failed with ``error``: the request itself is not at fault."""
    if isinstance(error, HTTPFailure):
        return error.status == _GONE or error.status >= _SERVER_ERROR
    return isinstance(error, (BadAnswer, Unreachable, SyncTimeout, VerifyError))


def shares(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """``items`` in at most ``count`` runs of consecutive items, in order, whose lengths differ by at most one."""
    count = min(count, len(items))
    short, longer = divmod(len(items), count) if count else (0, 0)
    ends = list(itertools.accumulate(short + (index < longer) for index in range(count)))
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(
    items: Sequence[Item],
    servers: Sequence[VLLMServer],
    ask: Callable[[VLLMServer, Sequence[Item]], Sequence[Answer]],
    failed: Callable[[VLLMServer, LoraflowError], None],
) -> list[Answer]:
    """Answers to ``items``, in order, asked of all ``servers`` at the same time.

    Args:
        items: What to ask, such as prompts.
        servers: Servers that have proven the policy asked for, at least one.
        ask: Asks one server for some items; any number of answers per item, in the items' order.
        failed: Told of every server that failed, before its share goes to the others. It may raise, to end it.

    Raises:
        LoraflowError: The request itself is at fault, or no server is left; the last server's error.
    """

    def attempt(pair: tuple[VLLMServer, Sequence[Item]]) -> Sequence[Answer] | LoraflowError:
        try:
            return ask(*pair)
        except LoraflowError as error:
            return error

    if not servers:
        raise LoraflowError("there is no server to ask: each is set aside", hint="the log says why; restart them")
    waiting: dict[int, Sequence[Item]] = dict(enumerate(shares(items, len(servers))))
    answers: dict[int, Sequence[Answer]] = {}
    able = list(servers)
    while waiting:
        turns = dict(zip(waiting, itertools.cycle(able), strict=False))
        with ThreadPoolExecutor(len(turns)) as pool:
            outcomes = dict(zip(turns, pool.map(attempt, [(turns[i], waiting[i]) for i in turns]), strict=True))
        for index, outcome in outcomes.items():
            if not isinstance(outcome, LoraflowError):
                answers[index] = outcome
                del waiting[index]
                continue
            if not is_servers_fault(outcome):
                raise outcome
            if turns[index] in able:
                able.remove(turns[index])
                failed(turns[index], outcome)
            if not able:
                raise outcome
    return [answer for index in sorted(answers) for answer in answers[index]]
