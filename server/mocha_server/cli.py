"""The commands `serve` and `transcribe`. Reads options and prints; the work is elsewhere."""

import logging
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import orjson
import torch
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mocha_model.allocator import keep_memory
from mocha_model.checkpoint import CheckpointError
from mocha_model.language import LanguageModelError
from mocha_model.recognizer import Recognizer
from mocha_server import serving
from mocha_server.app import create_app
from mocha_server.audio import AudioError, decode_file
from mocha_server.engine import model_info
from mocha_server.messages import Segment
from mocha_server.session import explain
from mocha_server.settings import FILE_BEAM, Settings
from mocha_server.subtitles import srt, vtt
from mocha_server.transcript import Transcript

console = Console(stderr=True)


class Format(StrEnum):
    """What `transcribe` writes."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


def serve(
    host: Annotated[str | None, typer.Option(help="address to listen at (127.0.0.1, or MOCHA_HOST)")] = None,
    port: Annotated[int | None, typer.Option(help="port (8000, or MOCHA_PORT)")] = None,
    wyoming_port: Annotated[
        int | None,
        typer.Option(min=1, help="TCP port for Wyoming clients, usually 10300 (off, or MOCHA_WYOMING_PORT)"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="checkpoint (the bundled one, or MOCHA_MODEL)")] = None,
    max_streams: Annotated[
        int | None, typer.Option(help="live streams at once; more are refused (512, or MOCHA_MAX_STREAMS)")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="processes that share the port (1, or MOCHA_WORKERS)")] = None,
) -> None:
    """Serve WebSocket streams, file uploads and the microphone page.

    More settings are MOCHA_... variables: docs/settings.md names all.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {"host": host, "port": port, "wyoming_port": wyoming_port, "model": model, "max_streams": max_streams}
    given["workers"] = workers
    try:
        settings = Settings(**{k: value for k, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        _complain(f"{explain(error)} (see the options of serve and MOCHA_... variables)")
        raise typer.Exit(1) from error
    if settings.wyoming_port == 0:
        _complain("0 is no port for Wyoming clients; without a number it is off")
        raise typer.Exit(1)
    if settings.wyoming_port:
        if settings.wyoming_port == settings.port:
            _complain(f"{settings.port} cannot be the port of both HTTP and Wyoming clients")
            raise typer.Exit(1)
        _check_free(settings.host, settings.wyoming_port)
    try:
        listener = serving.listen(settings.host, settings.port)
    except OSError as error:
        _complain(f"cannot listen at {settings.host}:{settings.port} ({error.strerror})")
        raise typer.Exit(1) from error
    try:
        app = create_app(settings)
    except (CheckpointError, LanguageModelError, ValueError) as error:
        _complain(error)
        raise typer.Exit(1) from error
    shown = "localhost" if settings.host in ("127.0.0.1", "0.0.0.0", "::") else settings.host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
    told = partial(console.print, f"open {address} and speak; API documentation at /docs", soft_wrap=True, markup=False)
    serving.run(app, listener, settings.workers, told)


def _complain(why: object) -> None:
    """One line, however long: a path in it stays whole."""
    console.print(f"[red]error:[/red] {escape(str(why))}", soft_wrap=True)


def _check_free(host: str, port: int) -> None:
    """A port in use is one line here; found out later it would be a traceback."""
    try:
        serving.listen(host, port).close()
    except OSError as error:
        _complain(f"cannot listen for Wyoming at {host}:{port}: {error.strerror}")
        raise typer.Exit(1) from error


def _segments(recognizer: Recognizer, path: Path, bar: Progress) -> Iterator[Segment]:
    """Closed segments of a file as they come."""
    transcript, state = Transcript(model_info(recognizer)), recognizer.init_state(1)
    task = bar.add_task(path.name, total=None)
    done = 0
    for block in decode_file(str(path), recognizer.sample_rate):
        emissions, state = recognizer.step(torch.from_numpy(block)[None], torch.tensor([len(block)]), state)
        done += len(block)
        yield from (m for m in transcript.push(emissions[0], done) if isinstance(m, Segment))
        bar.update(task, description=f"{path.name}  {done / recognizer.sample_rate:.0f} s heard")
    emissions, _ = recognizer.flush(state, torch.tensor([True]))
    yield from (m for m in transcript.push(emissions[0], done) if isinstance(m, Segment))


def transcribe(
    files: Annotated[list[Path], typer.Argument(help="audio files of any format")],
    output: Annotated[Format, typer.Option("--format", help="what to write to standard output")] = Format.TEXT,
    model: Annotated[Path | None, typer.Option(help="checkpoint; the bundled one if not given")] = None,
    beam: Annotated[
        int, typer.Option(min=0, max=512, help="hypotheses of a search with a language model; 0 reads greedily")
    ] = FILE_BEAM,
) -> None:
    """Transcribe files on this machine, without a server. With json, one line per file."""
    if len(files) > 1 and output in (Format.SRT, Format.VTT):
        _complain(f"{output.value} is of one file: the times of several would overlap")
        raise typer.Exit(2)
    keep_memory()
    failed = False
    try:
        recognizer = Recognizer.load(model)
        if beam:
            recognizer = recognizer.searching(beam)
    except (CheckpointError, LanguageModelError) as error:
        _complain(error)
        raise typer.Exit(1) from error
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for path in files:
            try:
                segments = list(_segments(recognizer, path, bar))
            except (AudioError, OSError) as error:
                _complain(f"{path}: {error}")
                failed = True
                continue
            try:
                sys.stdout.write(_render(path, segments, output))
                sys.stdout.flush()
            except OSError as error:
                _complain(f"standard output: {error.strerror}")
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the exit
                raise typer.Exit(1) from error
    if failed:
        raise typer.Exit(1)


def _render(path: Path, segments: list[Segment], output: Format) -> str:
    text = " ".join(s.text for s in segments)
    if output is Format.TEXT:
        return text + "\n"
    if output is Format.JSON:
        words = [word.model_dump() for segment in segments for word in segment.words]
        name = os.fsencode(path).decode(errors="replace")
        return orjson.dumps({"file": name, "text": text, "words": words}).decode() + "\n"
    return srt(segments) if output is Format.SRT else vtt(segments)
