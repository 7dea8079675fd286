"""A connection to a server on which a session has begun. Knows nothing of audio and text, or of lost connections."""

import asyncio
import socket as sockets
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidProxy, InvalidStatus, InvalidURI

from mocha_server.messages import Error, ErrorCode, Ready, Start, server_messages

DEFAULT_URL = "ws://localhost:8000/v1/stream"
NATIVE = urlsplit(DEFAULT_URL).path
ON_WAY_BYTES = 1 << 17  # in the buffer of the system: minutes of audio there could be more than is kept
CLOSE_S = 1.0  # that a server has to answer that a connection is closed
READY_S = 10.0  # that a server has to admit a stream once it is connected
STALLED_MS = 30_000  # a connection that takes nothing for so long is lost, where the system can tell (Linux)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ClientError(RuntimeError):
    """The stream cannot go on; `code` is the server's, or None where the server was not reached."""

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code


class KeyRefused(ClientError):
    """The server wants a key, and none was given, or not the right one."""

    def __init__(self, url: str, given: bool) -> None:
        why = "the one that was given is not the right one" if given else "none was given"
        super().__init__(f"the server at {url} wants its key (HTTP 401): {why}")


def authorization(api_key: str | None) -> dict[str, str]:
    """What a handshake carries for the sake of a key; raises ClientError where no header can."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ClientError("the key has spaces, or other characters that no header can carry")
    return {"Authorization": f"Bearer {api_key}"}


def endpoint(url: str) -> str:
    """The native endpoint of a server, given that or the address of its page.

    As in ``http://localhost:8000`` or ``https://host/prefix/``.

    Raises ClientError if `url` is no address.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # which is not looked at before
    except ValueError as error:
        raise ClientError(f"{url} is not the address of a server ({error})") from error
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss"):
        raise ClientError(
            f"{url} is not the address of a server: it begins with http:// or ws://, or https:// or wss://"
        )
    path = parts.path or "/"
    if parts.scheme in ("http", "https") or path == "/":  # of the page, which may lie below a prefix
        path = path.removesuffix("/").removesuffix(NATIVE) + NATIVE
    return parts._replace(scheme=scheme, path=path).geturl()


async def connected(url: str, start: Start, headers: Mapping[str, str]) -> tuple[ClientConnection, Ready]:
    """A connection to `url` on which a session has begun, and what the server said of it; raises ClientError.

    `headers`: of the handshake, beside those of each.
    """
    try:
        # No proxy stands between a machine and itself, whatever the environment says.
        proxy: Literal[True] | None = None if urlsplit(url).hostname in LOOPBACK else True
        # A server that paces us reads our pings, and answers them, behind the audio before them: that may be long.
        socket = await connect(
            url,
            additional_headers=headers,
            max_size=2**24,
            ping_timeout=None,
            close_timeout=CLOSE_S,
            proxy=proxy,
        )
        plain = socket.transport.get_extra_info("socket")
        plain.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, ON_WAY_BYTES)
        if hasattr(sockets, "TCP_USER_TIMEOUT"):
            plain.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, STALLED_MS)
    except (OSError, InvalidHandshake, InvalidURI, InvalidProxy, ImportError, TimeoutError, ValueError) as error:
        if isinstance(error, InvalidStatus) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise KeyRefused(url, given=bool(headers)) from error
        raise ClientError(f"no mocha-asr server answers at {url} ({error})") from error
    try:
        return socket, await _greet(socket, url, start)
    except BaseException:
        await socket.close()
        raise


async def _greet(socket: ClientConnection, url: str, start: Start) -> Ready:
    """Begin a session on a new connection; raises ClientError."""
    try:
        async with asyncio.timeout(READY_S):
            with suppress(ConnectionClosed):  # a server that refuses the stream has said why
                await socket.send(start.model_dump_json(exclude_none=True))
            first = server_messages.validate_json(await socket.recv())
    except ConnectionClosed as error:
        raise ClientError("the server closed the connection before the stream began") from error
    except (TimeoutError, ValidationError) as error:
        raise ClientError(f"{url} does not answer as /v1/stream of a mocha-asr server") from error
    if isinstance(first, Error):
        raise ClientError(first.message, first.code)
    if not isinstance(first, Ready):
        raise ClientError("the server did not begin with a ready message")
    return first
