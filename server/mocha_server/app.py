"""The ASGI application: puts engine, protocols and page together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Scope

from mocha_model.recognizer import Recognizer, language_for
from mocha_server.access import guard
from mocha_server.engine import Engine, Limits
from mocha_server.live_engines import LiveEngines
from mocha_server.metrics import FILES, PATIENT, Metrics
from mocha_server.openapi import DESCRIPTION, HEALTH, METRICS, add_page
from mocha_server.protocols import (
    deepgram,
    deepgram_file,
    native,
    openai_realtime,
    openai_transcriptions,
    vosk,
    wyoming,
)
from mocha_server.protocols.openai_transcriptions import RequestError
from mocha_server.settings import Settings

router = APIRouter()
WEB = Path(__file__).parent / "web"
FILES_AT_ONCE = 64  # read by joint search, in all workers; each has many prefixes to keep
PATIENT_ROWS = 128  # of a worker, for streams read with patience: more than a core has time for
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ADAPTERS = (native, openai_transcriptions, openai_realtime, deepgram, deepgram_file, vosk)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Cache-Control": "no-cache",  # asked again each time, sent again only when changed
}


def create_app(settings: Settings | None = None, recognizer: Recognizer | None = None) -> FastAPI:
    """An application with its own engine; `recognizer` instead of the checkpoint of `settings` if given.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        LanguageModelError: the language model cannot be used.
        ValueError: a setting does not fit the checkpoint.

    """
    settings = settings or Settings()
    torch.set_num_threads(1)  # a process with a pool of threads could not be forked into workers
    readers = _readers(settings, recognizer or Recognizer.load(settings.model))
    metrics = Metrics(settings.workers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = Limits(settings.max_streams, settings.block_ms, settings.max_buffer_s, settings.max_lag_ms / 1000)
        torch.set_num_threads(settings.threads)
        live = LiveEngines(Engine(readers.greedy, limits, metrics), unless_said=settings.patient)
        if readers.patient:
            few = replace(limits, rows=min(PATIENT_ROWS, limits.capacity))
            live = replace(live, patient=Engine(readers.patient, few, metrics.beside(PATIENT)))
        engines, files = list(live), live.greedy
        if readers.files:
            few = replace(limits, capacity=min(FILES_AT_ONCE, limits.capacity))
            files = Engine(readers.files, few, metrics.beside(FILES), background=True)
            engines.append(files)
        app.state.live, app.state.file_engine, app.state.settings = live, files, settings
        await asyncio.gather(*(asyncio.to_thread(engine.start) for engine in engines))
        # Its clients act on whole transcripts, so it is worth more to them to be right than to be early.
        async with wyoming.listening(files, settings) as app.state.wyoming_port:
            yield
        # Beside the event loop, on which those whose files are being read are told meanwhile.
        await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines))

    app = FastAPI(
        title="mocha-asr",
        version=version("mocha-asr"),
        description=DESCRIPTION,
        servers=[{"url": "."}],  # beside the document, also below a proxy's prefix
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.metrics = metrics
    app.add_exception_handler(ClientDisconnect, _gone)
    for adapter in ADAPTERS:
        app.include_router(adapter.router)
    app.include_router(router)
    add_page(app)
    app.add_api_route("/v1/{path:path}", _nothing_there, methods=METHODS, include_in_schema=False)
    app.mount("/client", Page(packages=[("mocha_client", "javascript")]))
    app.mount("/", Page(directory=WEB, html=True))
    guard(app, settings, page=frozenset({"/", *(f"/{file.name}" for file in WEB.iterdir())}))
    return app


async def _gone(_request: Request, _error: Exception) -> Response:
    """To nobody: the client has left before its request was read or answered."""
    return Response(status_code=499)


async def _nothing_there(request: Request) -> Response:
    """What OpenAI's clients understand, where there is no such path, or not for this method."""
    path, routes = request.url.path, [route for adapter in ADAPTERS for route in adapter.router.routes]
    opening = {**request.scope, "type": "websocket"}
    sockets = (route.matches(opening)[0] is Match.FULL for route in routes if isinstance(route, WebSocketRoute))
    if request.method == "GET" and any(sockets):
        why = f"{path} is a WebSocket: a proxy on the way must pass on the headers `Upgrade` and `Connection`"
        return RequestError(426, "upgrade_required", why).response({"Upgrade": "websocket", "Connection": "Upgrade"})
    same_path = [route for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
    methods = sorted({name for route in same_path if isinstance(route, Route) for name in route.methods or ()})
    if methods:
        why = f"{path} is not for {request.method}"
        return RequestError(405, "method_not_allowed", why).response({"Allow": ", ".join(methods)})
    return RequestError(404, "not_found", f"there is no {path}").response()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=HEALTH)
async def health(request: Request, response: Response) -> dict[str, str | int]:
    """Whether the server takes streams and files (200, or 503), and how many live ones it has."""
    live: LiveEngines = request.app.state.live
    running = all(each.is_running for each in (*live, request.app.state.file_engine))
    response.status_code = 200 if running else 503
    return {
        "status": "ok" if running else "stopped",
        "model": live.greedy.info.name,
        "streams": request.app.state.metrics.streams,
        "capacity": live.greedy.capacity,
    }


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse, responses=METRICS)
async def prometheus(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")


class _Readers(NamedTuple):
    """What reads live streams, and what reads others; None where the first reads them too."""

    greedy: Recognizer
    patient: Recognizer | None = None
    files: Recognizer | None = None


def _readers(settings: Settings, recognizer: Recognizer) -> _Readers:
    """Searches with a language model, where the settings want them and the checkpoint has one."""
    files, live, final = settings.file_beam, settings.live_beam, settings.final_beam
    language = language_for(recognizer.tokenizer, settings.language_model) if files or live or final else None
    if language is None:
        return _Readers(recognizer)
    frame_ms = 1000 * recognizer.frame_samples / recognizer.sample_rate
    least_ms = (recognizer.config.encoder.look_ahead_frames + 1) * frame_ms
    if live and settings.live_patience_ms < least_ms:
        raise ValueError(f"live_patience_ms: at least {least_ms:.0f} for this model, which hears so far ahead")
    return _Readers(
        recognizer.settling(final, language) if final else recognizer,
        recognizer.searching(live, language, settings.live_patience_ms / 1000) if live else None,
        recognizer.searching(files, language) if files else None,
    )


class Page(StaticFiles):
    """Files of the page: nothing from elsewhere runs on it, and nobody frames it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with the headers that say so."""
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response
