"""`POST /v1/listen`: Deepgram's pre-recorded transcription. The body is the file; it is spooled, never held whole."""

import asyncio
import hashlib
import tempfile
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import IO, Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.datastructures import QueryParams

from mocha_server.audio import AudioError
from mocha_server.decoding import IN_MEMORY_BYTES, decode_apart, in_threads
from mocha_server.engine import Engine
from mocha_server.messages import ErrorCode, Segment
from mocha_server.openapi import LISTEN, LISTEN_REQUEST
from mocha_server.protocols.deepgram_options import OptionError, RawOptions, favoured, raw_options
from mocha_server.protocols.deepgram_wire import alternative, metadata, model_info, refusal
from mocha_server.protocols.upload import Upload, UploadError, decode_raw, discard, reading, told_of_the_end
from mocha_server.stream import EngineError

router = APIRouter()
JSON = {"content-type": "application/json"}


@router.post("/v1/listen", openapi_extra=LISTEN_REQUEST, responses=LISTEN)
async def listen_file(request: Request) -> Response:
    """Transcribe the audio file that is the body; query parameters as in Deepgram's API."""
    engine: Engine = request.app.state.file_engine
    request_id = str(uuid.uuid4())
    with ExitStack() as end:
        file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115
        end.callback(discard, file)
        try:
            options, phrases = raw_options(request.query_params), favoured(request.query_params)
            if request.headers.get("content-type", "").startswith("application/json"):
                raise OptionError("this server fetches no URLs: send the audio itself as the body")
            with told_of_the_end():
                async with reading(request) as sent:
                    sha256 = await _spool(sent, file)
                upload = _upload(engine, file, options, phrases)
                segments = await upload.segments(request)
        except OptionError as error:
            return refusal(400, "INVALID_QUERY_PARAMETER", str(error), request_id)
        except UploadError as error:
            code = "Payload Too Large" if error.status_code == 413 else error.code
            return refusal(error.status_code, code, error.detail, request_id)
        except AudioError as error:
            return refusal(400, "Bad Request", f"{error} ({error.code.value})", request_id)
        except EngineError as error:
            full = error.code is ErrorCode.SERVER_FULL
            return refusal(503 if full else 500, error.code.value, str(error), request_id)
    name = engine.info.name
    about = metadata(request_id, sha256, datetime.now(UTC), upload.seconds, channels=1)
    about |= {"models": [name], "model_info": {name: model_info(name)}}
    return Response(orjson.dumps({"metadata": about, "results": _results(segments, request.query_params)}), 200, JSON)


async def _spool(request: Request, file: IO[bytes]) -> str:
    """Write the body to `file` and rewind it; gives its SHA-256."""
    sha256 = hashlib.sha256()
    async for piece in request.stream():
        sha256.update(piece)
        await asyncio.to_thread(file.write, piece)
    await asyncio.to_thread(file.seek, 0)
    return sha256.hexdigest()


def _upload(engine: Engine, file: IO[bytes], options: RawOptions | None, phrases: tuple[str, ...]) -> Upload:
    rate = engine.info.sample_rate
    blocks = in_threads(decode_raw(file, options.start(), rate)) if options else decode_apart(file, rate)
    return Upload(engine, blocks, phrases)


def _results(segments: list[Segment], query: QueryParams) -> dict[str, Any]:
    words = [word for segment in segments for word in segment.words]
    whole = alternative(" ".join(segment.text for segment in segments), words)
    results: dict[str, Any] = {"channels": [{"alternatives": [whole]}]}
    if _asks(query, "paragraphs"):
        whole["paragraphs"] = _paragraphs(segments)
    if _asks(query, "utterances"):
        results["utterances"] = [_utterance(segment) for segment in segments]
    return results


def _asks(query: QueryParams, name: str) -> bool:
    return query.get(name, "false").lower() == "true"


def _paragraphs(segments: list[Segment]) -> dict[str, Any]:
    """One of each segment, which is a sentence of it."""
    listed = []
    for segment in segments:
        place = {"start": segment.start, "end": segment.end}
        listed.append({"sentences": [{"text": segment.text} | place], "num_words": len(segment.words)} | place)
    return {"transcript": "\n\n".join(segment.text for segment in segments), "paragraphs": listed}


def _utterance(segment: Segment) -> dict[str, Any]:
    place = {"id": str(uuid.uuid4()), "start": segment.start, "end": segment.end, "channel": 0}
    return place | alternative(segment.text, segment.words)
