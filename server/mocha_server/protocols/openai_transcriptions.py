"""`POST /v1/audio/transcriptions` and `GET /v1/models` as OpenAI's clients speak them. Thin: engine in, JSON out."""

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from mocha_server.audio import AudioError
from mocha_server.decoding import decode_apart
from mocha_server.engine import Engine
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import ErrorCode, Segment, phrase_lists
from mocha_server.openapi import MODELS, ONE_MODEL, TRANSCRIPTIONS, transcription_form
from mocha_server.protocols.upload import (
    RETRY,
    STOPS,
    Upload,
    UploadError,
    discard_form,
    limited,
    never_silent,
    reading,
    told_of_the_end,
)
from mocha_server.session import explain
from mocha_server.stream import EngineError
from mocha_server.subtitles import srt, vtt

router = APIRouter()
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
STREAMED_FORMATS = ("json", "text")
FORM_LIMITS = {"max_files": 1, "max_fields": 300, "max_part_size": 1 << 16}
SILENT_S = 15.0  # without an event
TIMESTAMPS = "timestamp_granularities"
GRANULARITIES = ("word", "segment")


class RequestError(ValueError):
    """A request that cannot be served: HTTP status, OpenAI error type and code."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The error body of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status, {**RETRY.get(self.status, {}), **(headers or {})})


@dataclass(frozen=True)
class Wanted:
    """The fields of a request that matter here."""

    file: UploadFile
    format: str
    granularities: frozenset[str]
    stream: bool
    phrases: tuple[str, ...]


def wanted_by(form: FormData) -> Wanted:
    """Read a form; the SDKs give arrays names with `[]`. Raises RequestError."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError(400, "missing_file", "the form field `file` must be an audio file", "file")
    name = str(form.get("response_format") or "json")
    if name not in FORMATS:
        message = f"`response_format` is one of {', '.join(FORMATS)}"
        raise RequestError(400, "invalid_response_format", message, "response_format")
    stream = str(form.get("stream") or "").lower() == "true"
    if stream and name not in STREAMED_FORMATS:
        message = f"with `stream`, `response_format` is one of {', '.join(STREAMED_FORMATS)}"
        raise RequestError(400, "invalid_response_format", message, "response_format")
    given = {str(g) for key in (TIMESTAMPS, f"{TIMESTAMPS}[]") for g in form.getlist(key)}
    if not given <= set(GRANULARITIES):
        raise RequestError(400, "invalid_granularity", f"`{TIMESTAMPS}` are {' and '.join(GRANULARITIES)}", TIMESTAMPS)
    try:
        phrases = phrase_lists.validate_python([k for key in ("keywords", "keywords[]") for k in form.getlist(key)])
    except ValidationError as error:
        raise RequestError(400, "invalid_keywords", f"`keywords`: {explain(error)}", "keywords") from None
    return Wanted(file, name, frozenset(given or GRANULARITIES), stream, phrases)


@router.get("/v1/models", responses=MODELS)
async def models(request: Request) -> dict[str, Any]:
    """The one model of this server, and the names by which live streams ask for it with patience or without."""
    live: LiveEngines = request.app.state.live
    names = list(live.greedy.info.models) if live.patient else [live.greedy.info.name]
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name}", responses=ONE_MODEL)
async def model(request: Request, name: str) -> Response:
    """One of them."""
    if name in [known["id"] for known in (await models(request))["data"]]:
        return _json(_model(name))
    return RequestError(404, "model_not_found", f"there is no model {name}", "model").response()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mocha-asr"}


@router.post(
    "/v1/audio/transcriptions",
    openapi_extra=transcription_form(FORMATS, GRANULARITIES),
    responses=TRANSCRIPTIONS,
)
async def transcriptions(request: Request) -> Response:
    """Transcribe an audio file of any length; fields as in OpenAI's API, others are accepted and ignored."""
    try:
        with told_of_the_end():
            return await _transcribed(request)
    except UploadError as error:
        return RequestError(error.status_code, error.code, error.detail).response()
    except HTTPException as error:
        return RequestError(error.status_code, "invalid_form", error.detail).response()


async def _form(request: Request) -> FormData:
    """Its form; raises HTTPException where it is none, UploadError where not all of it could be read."""
    try:
        async with reading(request) as sent:
            return await sent.form(**FORM_LIMITS)
    except UnicodeError:  # charset=undefined, for one
        raise HTTPException(400, "the form's text is not in its charset") from None


async def _transcribed(request: Request) -> Response:
    """The answer; raises HTTPException where the form is none, or not all of it came."""
    engine: Engine = request.app.state.file_engine
    form = await _form(request)
    streaming = False
    try:
        wanted = wanted_by(form)
        upload = Upload(engine, decode_apart(wanted.file.file, engine.info.sample_rate), wanted.phrases)
        if not wanted.stream:
            return render(wanted, await upload.segments(request), upload.seconds)
        await upload.open()
        streaming = True  # the upload is read until the response has ended
        return EventStream(upload, form)
    except RequestError as error:
        return error.response()
    except AudioError as error:
        return RequestError(400, error.code.value, str(error), "file").response()
    except EngineError as error:
        full = error.code is ErrorCode.SERVER_FULL
        return RequestError(503 if full else 500, error.code.value, str(error)).response()
    finally:
        if not streaming:
            discard_form(form)


@router.post("/v1/audio/translations", include_in_schema=False)
async def translations(request: Request) -> Response:
    """Refused: the model writes what it hears. The upload is read first, or clients would see a broken connection."""
    try:
        with told_of_the_end():
            async for _ in limited(request).stream():
                pass
    except UploadError as error:
        return RequestError(error.status_code, error.code, error.detail).response()
    message = "this server transcribes and does not translate: use /v1/audio/transcriptions"
    return RequestError(400, "translation_unsupported", message).response()


class EventStream(StreamingResponse):
    """Server-sent events of an upload that is open, and what ends with them, however they end."""

    def __init__(self, upload: Upload, form: FormData) -> None:
        super().__init__(_events(upload), media_type="text/event-stream")
        self._upload, self._form = upload, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the server ends
            last = _failed("server_error", ErrorCode.INTERNAL, STOPS)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._upload.close()
            discard_form(self._form)


async def _events(upload: Upload) -> AsyncIterator[bytes]:
    """An error after the first byte is an event too. Comments are for proxies, which end what is silent for long."""
    said: list[str] = []
    try:
        async for message in never_silent(upload.messages(), SILENT_S):
            if message is None:
                yield b": more will come\n\n"
            elif isinstance(message, Segment):
                said.append(message.text)
            else:
                yield _event({"type": "transcript.text.delta", "delta": message.delta})
    except (AudioError, EngineError) as error:
        kind = "server_error" if isinstance(error, EngineError) else "invalid_request_error"
        yield _failed(kind, error.code, str(error))
        return
    yield _event({"type": "transcript.text.done", "text": " ".join(said)})  # its `usage` would be of tokens
    yield b"data: [DONE]\n\n"


def _failed(kind: str, code: ErrorCode, message: str) -> bytes:
    return _event({"type": "error", "error": {"type": kind, "code": code, "message": message}})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def render(wanted: Wanted, segments: list[Segment], seconds: float) -> Response:
    """The body for a response format."""
    text = " ".join(s.text for s in segments)
    if wanted.format == "text":
        return PlainTextResponse(text + "\n")
    if wanted.format in ("srt", "vtt"):
        return PlainTextResponse(srt(segments) if wanted.format == "srt" else vtt(segments))
    usage = {"type": "duration", "seconds": math.ceil(seconds)}
    if wanted.format == "json":
        return _json({"text": text, "usage": usage})
    body = {"task": "transcribe", "language": "english", "duration": round(seconds, 3), "text": text, "usage": usage}
    if "word" in wanted.granularities:
        body["words"] = [{"word": w.word, "start": w.start, "end": w.end} for s in segments for w in s.words]
    if "segment" in wanted.granularities:
        body["segments"] = [_segment(s) for s in segments]
    return _json(body)


def _segment(s: Segment) -> dict[str, Any]:
    confidences = [max(w.confidence, 1e-3) for w in s.words]
    return {
        "id": s.segment,
        "seek": 0,
        "start": s.start,
        "end": s.end,
        "text": s.text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": sum(map(math.log, confidences)) / len(confidences),
        "compression_ratio": len(s.text.encode()) / len(zlib.compress(s.text.encode())),
        "no_speech_prob": 0.0,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
