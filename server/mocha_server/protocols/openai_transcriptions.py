"""`POST /v1/audio/transcriptions` and `GET /v1/models` as OpenAI's clients speak them. Thin: engine in, JSON out."""

import asyncio
import math
import zlib
from collections.abc import AsyncIterator
from typing import IO, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.datastructures import UploadFile

from mocha_server.audio import AudioError, Samples, decode_file
from mocha_server.engine import Engine, EngineError, Stream
from mocha_server.messages import ErrorCode, Segment, Text
from mocha_server.subtitles import srt, vtt
from mocha_server.transcript import Transcript

router = APIRouter()
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")


class RequestError(ValueError):
    """A request that cannot be served: HTTP status, OpenAI error type and code."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def response(self) -> JSONResponse:
        """The error body of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, status_code=self.status)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model of this server."""
    name = request.app.state.engine.info.name
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "mocha-asr"}]}


@router.post(
    "/v1/audio/transcriptions",
    openapi_extra={
        "requestBody": {
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "model": {"type": "string"},
                            "response_format": {"type": "string", "enum": list(FORMATS)},
                            "stream": {"type": "boolean"},
                        },
                    }
                }
            }
        }
    },
)
async def transcriptions(request: Request) -> Response:
    """Transcribe an audio file of any length; fields as in OpenAI's API, others are accepted and ignored."""
    engine: Engine = request.app.state.engine
    form = await request.form()
    streaming = False
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RequestError(400, "missing_file", "the form field `file` must be an audio file", "file")
        wanted = str(form.get("response_format") or "json")
        if wanted not in FORMATS:
            message = f"`response_format` is one of {', '.join(FORMATS)}"
            raise RequestError(400, "invalid_response_format", message, "response_format")
        upload = Upload(engine, file.file)
        first = await upload.open()
        if str(form.get("stream") or "").lower() == "true":
            streaming = True  # the upload is read until the response has ended
            return StreamingResponse(
                _events(upload, first), media_type="text/event-stream", background=BackgroundTask(form.close)
            )
        segments = [m async for m in upload.messages(first) if isinstance(m, Segment)]
        return render(wanted, segments, upload.seconds)
    except RequestError as error:
        return error.response()
    except AudioError as error:
        return RequestError(400, error.code.value, str(error), "file").response()
    except EngineError as error:
        full = error.code is ErrorCode.SERVER_FULL
        return RequestError(503 if full else 500, error.code.value, str(error)).response()
    finally:
        if not streaming:
            await form.close()


class Upload:
    """One file on its way through the engine."""

    def __init__(self, engine: Engine, file: IO[bytes]) -> None:
        self._engine = engine
        self._blocks = decode_file(file, engine.info.sample_rate)
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        """Audio decoded so far."""
        return self._num_samples / self._engine.info.sample_rate

    async def open(self) -> Samples | None:
        """The first block, so that bad files fail before anything is sent."""
        return await asyncio.to_thread(next, self._blocks, None)

    async def messages(self, block: Samples | None) -> AsyncIterator[Text | Segment]:
        """Text and segments as they come."""
        stream = self._engine.open(live=False)
        feeder = asyncio.create_task(self._feed(stream, block))
        transcript = Transcript(self._engine.info)
        try:
            async for emissions in stream.events():
                for message in transcript.push(emissions):
                    yield message
            await feeder
        finally:
            feeder.cancel()
            stream.close()
            await asyncio.gather(feeder, return_exceptions=True)

    async def _feed(self, stream: Stream, block: Samples | None) -> None:
        while block is not None and not stream.closed:
            self._num_samples += len(block)
            await stream.write(block)
            block = await asyncio.to_thread(next, self._blocks, None)
        stream.finish()


async def _events(upload: Upload, first: Samples | None) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the first byte is an event too."""
    text = ""
    try:
        async for message in upload.messages(first):
            if isinstance(message, Text):
                text += message.delta
                yield _event({"type": "transcript.text.delta", "delta": message.delta})
    except EngineError as error:
        yield _event({"type": "error", "error": {"type": "server_error", "code": error.code, "message": str(error)}})
        return
    usage = {"type": "duration", "seconds": math.ceil(upload.seconds)}
    yield _event({"type": "transcript.text.done", "text": text.strip(), "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def render(wanted: str, segments: list[Segment], seconds: float) -> Response:
    """The body for a response format."""
    text = " ".join(s.text for s in segments)
    if wanted == "text":
        return PlainTextResponse(text + "\n")
    if wanted in ("srt", "vtt"):
        return PlainTextResponse(srt(segments) if wanted == "srt" else vtt(segments))
    if wanted == "json":
        return _json({"text": text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}})
    words = [{"word": w.word, "start": w.start, "end": w.end} for s in segments for w in s.words]
    return _json(
        {
            "task": "transcribe",
            "language": "english",
            "duration": round(seconds, 3),
            "text": text,
            "words": words,
            "segments": [_segment(s) for s in segments],
            "usage": {"type": "duration", "seconds": math.ceil(seconds)},
        }
    )


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
