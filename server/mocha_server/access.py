"""Who may use the server: those that carry its key, and pages from where the operator allows.

Of the protocols it knows only how each says no. The page itself, the API's description and `/health` need no key: what
they show is no secret. WebSockets always do, also at the page's own path, where vosk-server's protocol is.
"""

import hmac
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from urllib.parse import urlsplit

from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mocha_server.openapi import ASSETS, describe_key
from mocha_server.protocols import deepgram_wire
from mocha_server.protocols.live import KEY_SUBPROTOCOLS
from mocha_server.protocols.openai_transcriptions import RequestError
from mocha_server.protocols.upload import UploadError, forget, told_of_the_end
from mocha_server.settings import Settings

SCHEMES = tuple(name.encode() for name in KEY_SUBPROTOCOLS)
OPENAI_SUBPROTOCOL = "openai-insecure-api-key."  # how OpenAI's clients in browsers, which can set no headers, begin it
PUBLIC = ("/health", "/docs", "/openapi.json")
PUBLIC_BELOW = ("/client/", f"/{ASSETS}/")
EXPOSED = ("dg-request-id", "dg-error")  # headers of answers that other pages may read
METHODS = ("GET", "POST")


def guard(app: FastAPI, settings: Settings, page: frozenset[str]) -> None:
    """Let `app` ask for the key of `settings`, if they have one, and for origins; `page`: paths of the page's files."""
    if settings.api_key is not None:
        app.add_middleware(Keys, key=settings.api_key, public=page.union(PUBLIC))
        describe_key(app)
    if settings.allow_origins is not None:
        if "*" not in settings.allow_origins:
            app.add_middleware(Origins, allowed=settings.allow_origins)
        # Outermost, so that pages can read refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )


class Keys:
    """Passes on what carries the key, and requests for `public` paths."""

    def __init__(self, app: ASGIApp, key: SecretStr, public: frozenset[str]) -> None:
        self._app, self._key, self._public = app, key.get_secret_value().encode(), public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `ASGIApp`."""
        if scope["type"] == "lifespan" or self._is_public(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        why = "this server wants its key, as in `Authorization: Bearer KEY`, and the request has none or another one"
        response = _refusal(scope, 401, "invalid_api_key", "INVALID_AUTH", why)
        response.headers["WWW-Authenticate"] = "Bearer"
        await _refuse(response, scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["type"] == "http" and (path in self._public or path.startswith(PUBLIC_BELOW))

    def _has_key(self, scope: Scope) -> bool:
        return any(hmac.compare_digest(key, self._key) for key in keys_of(scope))


def keys_of(scope: Scope) -> Iterator[bytes]:
    """What a request or a handshake gives for keys: in its headers or, as browsers have to, in subprotocols."""
    for value in Headers(scope=scope).getlist("authorization"):
        scheme, _, key = value.encode("latin-1").partition(b" ")
        if scheme.lower() in SCHEMES:
            yield key.strip()
    offered: list[str] = scope.get("subprotocols") or []
    for name, following in pairwise(offered):
        if name in KEY_SUBPROTOCOLS:
            yield following.encode()
    for name in offered:
        if name.startswith(OPENAI_SUBPROTOCOL):
            yield name.removeprefix(OPENAI_SUBPROTOCOL).encode()


class Origins:
    """Refuses WebSockets of pages that are neither this server's own nor from an allowed origin.

    Browsers keep pages from reading the answers to their requests, but not from talking over WebSockets.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `ASGIApp`."""
        if scope["type"] == "websocket" and not self._may_open(Headers(scope=scope)):
            why = "this server takes no WebSockets from pages of this origin"
            await _refuse(_refusal(scope, 403, "origin_not_allowed", "FORBIDDEN", why), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_open(self, headers: Headers) -> bool:
        origin = headers.get("origin")  # which only browsers send
        return origin is None or origin in self._allowed or _host(origin) == headers.get("host", "").lower()


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _refusal(scope: Scope, status: int, code: str, deepgram_code: str, why: str) -> JSONResponse:
    """The error body of the protocol that is spoken at the path; OpenAI's where none has one of HTTP."""
    if scope["path"].startswith("/v1/listen"):
        return deepgram_wire.refusal(status, deepgram_code, why, str(uuid.uuid4()))
    return RequestError(status, code, why).response()


async def _refuse(response: JSONResponse, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, once a body is sent: many clients write all of it before they read an answer."""
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
        return
    with suppress(UploadError), told_of_the_end():
        await forget(Request(scope, receive))
    await response(scope, receive, send)
