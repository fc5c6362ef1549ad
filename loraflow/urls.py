"""URLs of servers: what a user writes, brought into one form or refused; and where a server that listens is reached."""

from __future__ import annotations

from urllib.parse import urlsplit

from requests.utils import requote_uri

from loraflow.errors import ConfigError

__all__ = ["server_url", "url_of"]


def server_url(given: str) -> str:
    """The base URL that ``given`` means: ``http`` where no scheme is given, without the ``/v1`` of OpenAI's clients.

    Raises:
        ConfigError: It is no URL of a server, or carries what does not belong in one.
    """
    text = given.strip()
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{given!r} is no URL of a server: {error}", hint=_FORM) from error
    if "@" in parts.netloc:
        raise ConfigError(
            f"the URL of {host} carries a user name or a password, which logs and records would show",
            hint="put the key into VLLM_API_KEY, the plugin's token into LORAFLOW_TOKEN, and leave it out of the URL",
        )
    unreadable = " " in text or not text.isprintable()
    if parts.scheme not in {"http", "https"} or not host or port == 0 or unreadable:
        raise ConfigError(f"{given!r} is no URL of a server", hint=_FORM)
    if parts.query or parts.fragment:
        raise ConfigError(f"{given!r} has a part after ? or #, and calls are made below it", hint=_FORM)
    path = requote_uri(parts.path.rstrip("/").removesuffix("/v1").rstrip("/"))  # as it is sent
    return f"{parts.scheme}://{parts.netloc}{path}"


_FORM = "write http://HOST:PORT (an IPv6 address in brackets), e.g. http://127.0.0.1:8000"


def url_of(host: str, port: int | str) -> str:
    """The URL at which a server that listens on ``host`` is reached from here."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - not bound
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
