/** How samples are written; 16- and 32-bit ones are little-endian. */
export type Encoding = "pcm_s16le" | "pcm_f32le" | "mulaw" | "alaw";

export type ErrorCode =
  | "start_expected"
  | "invalid_message"
  | "invalid_audio"
  | "unsupported_media"
  | "empty_audio"
  | "server_full"
  | "too_slow"
  | "idle"
  | "internal";

/** The server has admitted the stream. */
export interface Ready {
  type: "ready";
  session: string;
  model: string;
  /** Hz the model listens at. */
  sample_rate: number;
  frame_ms: number;
  /** How far a frame's audio reaches beyond its start. */
  latency_ms: number;
  /** After that, a character is emitted at the earliest. */
  look_ahead_ms: number;
  chunk_width: number;
  /** After its frame, a character is emitted at the latest; 0 if greedily. */
  patience_ms: number;
}

export interface Character {
  text: string;
  /** Encoder frame it was emitted at, from the start of the stream. */
  frame: number;
  /** Seconds from the start of the stream at which that frame's audio was complete. */
  time: number;
  /** Selection probability, or in a patient stream the CTC branch's; 0 where the end of the audio forced it. */
  p: number;
  /** Probability of the character once the frame was selected. */
  q: number;
  /** Attention over the frames up to and including `frame`. */
  chunk: number[];
}

export interface Word {
  word: string;
  start: number;
  end: number;
  confidence: number;
}

/** New characters. Deltas are only ever appended: joined, they are the transcript, unless the server settles segments. */
export interface TextEvent {
  type: "text";
  segment: number;
  delta: string;
  characters: Character[];
}

/** A segment is closed; if it is cut, what is said goes on: it has become too long, or its connection was lost. */
export interface SegmentEvent {
  type: "segment";
  segment: number;
  text: string;
  start: number;
  end: number;
  words: Word[];
  cut: boolean;
}

/** The connection was lost and is back, listening from `time` on; `missing` seconds before it gave no text and are gone. */
export interface ReconnectedEvent {
  type: "reconnected";
  time: number;
  missing: number;
}

/** The last event of a finished stream. */
export interface EndEvent {
  type: "end";
  segments: number;
  duration: number;
}

export type StreamEvent = TextEvent | SegmentEvent | ReconnectedEvent | EndEvent;

/** Something about the stream that did not end it. */
export interface Warning {
  type: "error";
  code: ErrorCode;
  message: string;
  fatal: false;
}

export interface StreamOptions {
  /** Hz of the audio that `send` is given, 8000 to 48000; 16000. */
  sampleRate?: number;
  /** "pcm_s16le". */
  encoding?: Encoding;
  /** Interleaved channels, 1 to 8; 1. */
  channels?: number;
  /** Words that this stream is likely to have, such as names: at most 200 of at most 60 characters; none. */
  phrases?: string[];
  /** Whether to search for a while before a character is emitted: far fewer errors, a tenth of a second later; if not given, as the server is set. */
  patient?: boolean;
  /** Silence that ends a segment, 200 to 10000 milliseconds; if not given, the model's own. */
  pauseMs?: number;
  /** Of a server that wants one: letters, digits and any of !#$%&'*+-.^_`|~; sent as a subprotocol, which browsers can. */
  apiKey?: string;
  /** How long to go without text before a lost connection is given up, not counting a sleep of the machine; 30. 0 never tries. */
  reconnectSeconds?: number;
  /** Audio kept for a new connection, at most, where that is more than 8 MiB; 300. */
  keepSeconds?: number;
  /** Where there is no global one. */
  WebSocket?: new (url: string | URL, protocols?: string[]) => unknown;
}

/** The stream cannot go on; `code` is the server's, or null where the server was not reached. */
export class StreamError extends Error {
  readonly code: ErrorCode | null;
  constructor(message: string, code?: ErrorCode | null);
}

/** One stream: `open`, `send` bytes of any size, `finish`, and iterate over events until `end`. */
export class StreamingClient implements AsyncIterable<StreamEvent> {
  constructor(url: string | URL, options?: StreamOptions);
  /** What the server said when it admitted the stream; null before. */
  readonly ready: Ready | null;
  readonly warnings: Warning[];
  /** Bytes that were sent and have not left this machine. */
  readonly waitingBytes: number;
  /** Whether the connection was lost and is being replaced. */
  readonly reconnecting: boolean;
  /** Connect; resolves once the server admits the stream. Rejects with StreamError, also where it is open already. */
  open(): Promise<Ready>;
  /**
   * Send audio, cut anywhere; waits while the server is behind or away. Calls that overlap, `finish` too, are sent in
   * their order. Rejects with StreamError, also before `open` and once the stream has ended; with TypeError for what is no
   * audio.
   */
  send(audio: ArrayBuffer | ArrayBufferView): Promise<void>;
  /** No more audio: the server emits the rest, then `end`. Rejects with StreamError, also once the stream has ended. */
  finish(): Promise<void>;
  /** Close the connection, finished or not. */
  close(): void;
  /** Events until `end`, the last, and none after it; throws StreamError, also before `open`. */
  [Symbol.asyncIterator](): AsyncGenerator<StreamEvent, void, void>;
}

/** SubRip of closed segments. */
export function toSrt(segments: Iterable<Pick<SegmentEvent, "words">>): string;

/** WebVTT of closed segments. */
export function toVtt(segments: Iterable<Pick<SegmentEvent, "words">>): string;
