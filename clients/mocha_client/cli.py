"""The command `mocha-asr`: finds its sub-commands by entry points and imports only the one asked for; and `stream`."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from mocha_client.captions import FORMATS, Captions
from mocha_client.client import DEFAULT_URL, ClientError, StreamingClient
from mocha_client.sources import (
    DECODED,
    SourceError,
    decoded_pieces,
    microphone_pieces,
    piece_bytes,
    raw_pieces,
    read_aside,
)
from mocha_client.terminal import JsonView, MicrophoneView, PlainView, View, notice, warn
from mocha_server.messages import (
    LEAST_PAUSE_MS,
    LONGEST_PAUSE_MS,
    MAX_PHRASE_CHARACTERS,
    MAX_PHRASES,
    Encoding,
    Start,
)

console = Console(stderr=True)
INTERRUPTED = 130  # exit code, as shells have it
SUMMARIES = {
    "bench": "Load a server, or the engine alone, with many paced streams of speech and report.",
    "serve": "Serve WebSocket streams, file uploads and the microphone page.",
    "stream": "Send files, a pipe or the microphone to a server; characters appear as they are emitted.",
    "transcribe": "Transcribe files on this machine, without a server.",
    "train": "Train a recogniser.",
    "evaluate": "Measure a recogniser on a corpus.",
    "report": "Draw the loss curves and alignments of a training run.",
    "average": "Average the weights of several checkpoints.",
    "calibrate": "Fit the confidence of words to how often they are right.",
    "align": "Draw where in a recording the model listens for each character.",
    "synthesize": "Read text aloud with every free voice here, as training data.",
    "prepare": "Read a published corpus in its own layout into manifests to train from.",
    "train-lm": "Make a language model of words from text, for searches.",
}


def main() -> None:
    """Entry point of the command line."""
    if os.getpid() == 1:  # of a container: signals that nobody handles are lost
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    commands = {point.name: point for point in entry_points(group="mocha_asr.commands")}
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked == "--version":
        print(version("mocha-asr"))
    elif asked in commands:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        try:
            app.command(name=asked)(commands[asked].load())
        except ModuleNotFoundError as error:
            if not commands[asked].module.startswith("mocha_training") or str(error.name).startswith("mocha_"):
                raise
            lacks = f"{asked} needs {error.name}: install mocha-asr with the extra `train`"
            _complain(lacks)
            raise SystemExit(1) from error
        sys.argv = [f"mocha-asr {asked}", *sys.argv[2:]]
        app()
    else:
        lines = ["Usage: mocha-asr COMMAND ...   (mocha-asr COMMAND --help explains one)\n"]
        lines += [f"  {name:<14}{SUMMARIES.get(name, '')}" for name in sorted(commands)]
        try:
            print("\n".join(lines), flush=True)
        except BrokenPipeError:  # nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the exit
        if asked not in ("--help", "-h"):
            _complain(f"no such command: {asked}")
            raise SystemExit(2)


def stream(
    files: Annotated[list[str] | None, typer.Argument(help='audio files of any format; "-" is standard input')] = None,
    url: Annotated[str, typer.Option(help="the server's native endpoint, or the address of its page")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="MOCHA_API_KEY", help="of a server that wants one")] = None,
    chunk_ms: Annotated[int, typer.Option(min=1, max=60_000, help="audio in each message")] = 100,
    realtime: Annotated[bool, typer.Option(help="pace files as if they were spoken now")] = False,
    microphone: Annotated[bool, typer.Option(help="listen to the microphone until Ctrl-C")] = False,
    captions: Annotated[Path | None, typer.Option(help="keep captions in this .srt or .vtt file, live")] = None,
    encoding: Annotated[Encoding | None, typer.Option(help="of raw input, which has no header")] = None,
    sample_rate: Annotated[int | None, typer.Option(min=8_000, max=48_000, help="Hz of raw input; 16000")] = None,
    channels: Annotated[int | None, typer.Option(min=1, max=8, help="of raw input, interleaved; 1")] = None,
    phrase: Annotated[list[str] | None, typer.Option(help="expect this name or phrase; may be given again")] = None,
    patient: Annotated[
        bool | None,
        typer.Option(
            "--patient/--greedy",
            help="far fewer errors, later / no search, sooner; if neither is given, as the server is set",
        ),
    ] = None,
    pause_ms: Annotated[
        int | None,
        typer.Option(min=LEAST_PAUSE_MS, max=LONGEST_PAUSE_MS, help="silence that ends a segment; the model's own"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print only one JSON object per file, at its end")] = False,
) -> None:
    """Send audio to a server; characters appear as they are emitted."""
    if microphone == bool(files):
        _refuse("give files, or - for a pipe, or --microphone")
    if microphone and encoding:
        _refuse("--encoding is for files and pipes")
    if encoding is Encoding.CONTAINER:
        _refuse("--encoding is for raw audio: containers say themselves what they are")
    if (sample_rate or channels) and not encoding:
        _refuse("--sample-rate and --channels are of raw input, and need --encoding")
    if captions and captions.suffix.lower() not in FORMATS:
        _refuse("--captions needs a name that ends in .srt or .vtt")
    if captions and len(files or []) > 1:
        _refuse("--captions is for one file at a time: times of several would overlap")
    start = _asking((encoding, sample_rate, channels), phrases=phrase or (), patient=patient, pause_ms=pause_ms)
    try:
        if microphone:
            view = MicrophoneView(console) if console.is_terminal and not as_json else _view(as_json)
            asyncio.run(_stream(microphone_pieces(chunk_ms), start, url, api_key, view, captions))
        heard = []
        for path in files or []:
            interrupted = asyncio.Event()
            pieces = raw_pieces(path, chunk_ms, start) if encoding else decoded_pieces(path, chunk_ms)
            given = read_aside(pieces, interrupted)
            paced = _paced(given, piece_bytes(start, 1000), interrupted) if realtime else given
            heard.append(_is_heard(_stream(paced, start, url, api_key, _view(as_json), captions)))
            if interrupted.is_set():
                raise typer.Exit(INTERRUPTED)
        if not all(heard):
            raise typer.Exit(1)
    except (ClientError, SourceError, OSError) as error:
        _complain(error)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print()
        raise typer.Exit(INTERRUPTED) from None


def _complain(why: object) -> None:
    """One line, however long: a path in it stays whole."""
    console.print("[red]error:[/red]", escape(str(why)), highlight=False, soft_wrap=True)


def _refuse(why: str) -> NoReturn:
    _complain(why)
    raise typer.Exit(2)


def _asking(raw: tuple[Encoding | None, int | None, int | None], **wishes: Any) -> Start:
    """How the audio is written, as decoded files are where it is not given, and what is wished for its stream."""
    given = {k: value for k, value in zip(("encoding", "sample_rate", "channels"), raw, strict=True) if value}
    try:
        return Start(**DECODED.model_dump() | given | wishes)
    except ValidationError:
        _refuse(f"--phrase: at most {MAX_PHRASES} of at most {MAX_PHRASE_CHARACTERS} characters")


def _view(as_json: bool) -> View:
    return JsonView() if as_json else PlainView()


async def _paced(pieces: AsyncIterator[bytes], bytes_per_s: int, interrupted: asyncio.Event) -> AsyncIterator[bytes]:
    """Pieces, each no earlier than its audio would have been spoken; those left when `interrupted`, at once."""
    began, num_bytes = time.monotonic(), 0
    async for piece in pieces:
        num_bytes += len(piece)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(interrupted.wait(), max(0.0, began + num_bytes / bytes_per_s - time.monotonic()))
        yield piece


def _is_heard(streaming: Coroutine[Any, Any, None]) -> bool:
    """Whether what is streamed could be read; else it is told why not."""
    try:
        asyncio.run(streaming)
    except SourceError as error:
        _complain(error)
        return False
    return True


async def _stream(
    pieces: AsyncIterator[bytes], start: Start, url: str, api_key: str | None, view: View, captions: Path | None
) -> None:
    async def shown() -> AsyncIterator[bytes]:
        async for piece in pieces:
            view.heard(piece)
            yield piece

    async with StreamingClient(
        url,
        start.sample_rate,
        start.encoding,
        start.channels,
        start.phrases,
        patient=start.patient,
        pause_ms=start.pause_ms,
        api_key=api_key,
    ) as client:
        assert client.ready is not None
        subtitles = Captions(captions, client.ready.frame_ms / 1000) if captions else None
        try:
            with view:
                async for event in client.transcribe(shown()):
                    notice(event, console)
                    view.said(event)
                    if subtitles:
                        subtitles.push(event)
        finally:
            for warning in client.warnings:
                warn(warning, console)
