// StreamingClient: audio in, events out, over a mocha-asr server's native protocol (docs/protocol.md).
// No dependencies; types in mocha-asr.d.ts. The same client in Python is mocha_client/client.py.

const SAMPLE_BYTES = { pcm_s16le: 2, pcm_f32le: 4, mulaw: 1, alaw: 1 };
const PIECE_BYTES = 1 << 16; // of audio in one message; servers refuse messages without bound
const KEPT_BYTES = 8 << 20; // of audio, at least: more than is on its way, in buffers of systems, when a connection is lost
const PASSING = ["server_full", "internal"]; // errors after which a new connection may succeed
const FIRST_PAUSE_MS = 100, MAX_PAUSE_MS = 5000; // between attempts to connect again; doubled each time
const READY_MS = 10_000; // for a server to admit a stream
const STOOD_MS = 5000; // a connection lost after so long is a loss of its own, not one attempt more
const STALLED_MS = 60_000; // a connection that takes nothing for so long, and brings nothing, is lost
const KEY = /^[\w!#$%&'*+.^`|~-]+$/; // what a subprotocol may have
const OPEN = 1; // WebSocket.readyState
const KINDS = ["ready", "text", "segment", "end", "error"]; // of messages

export class StreamError extends Error {
  constructor(message, code = null) {
    super(message);
    this.name = "StreamError";
    this.code = code;
  }
}

function understood(data) {
  try {
    const message = JSON.parse(data);
    return KINDS.includes(message?.type) ? message : null;
  } catch {
    return null;
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Audio not yet heard, and times that count on over several sessions of the server. No sockets, no clock.
class Continuity {
  #rate; #sampleBytes; #keepBytes;
  #kept = []; // {from: position in bytes since the start, bytes}
  #end = 0; // position of the next audio to be sent
  #frame = 0; // seconds
  #offset = 0; #heard = 0; // seconds: of this session's start; of what gave text
  #segments = 0; #firstSegment = 0;
  #open = []; // characters of the open segment
  #last = ""; #joins = false;

  constructor({ sample_rate, encoding, channels }, keepSeconds) {
    this.#rate = sample_rate;
    this.#sampleBytes = SAMPLE_BYTES[encoding] * channels;
    this.#keepBytes = Math.max(KEPT_BYTES, Math.floor(keepSeconds * sample_rate) * this.#sampleBytes);
  }

  ready(message) { this.#frame = message.frame_ms / 1000; }

  sent(bytes) {
    this.#kept.push({ from: this.#end, bytes });
    this.#end += bytes.length;
    const needed = Math.max(this.#position(this.#heard), this.#end - this.#keepBytes);
    while (this.#kept.length && this.#kept[0].from + this.#kept[0].bytes.length <= needed) this.#kept.shift();
  }

  // What a message of the server says, counted from the start of the stream.
  received(message) {
    if (message.type === "end")
      return { ...message, segments: this.#segments, duration: message.duration + this.#offset };
    const segment = message.segment + this.#firstSegment;
    const moved = (item) => ({ ...item, start: item.start + this.#offset, end: item.end + this.#offset });
    if (message.type === "segment") {
      this.#open = [];
      this.#segments = segment + 1;
      return { ...moved(message), segment, words: message.words.map(moved) };
    }
    const shift = Math.round(this.#offset / this.#frame);
    const characters = message.characters.map((c) => ({ ...c, frame: c.frame + shift, time: c.time + this.#offset }));
    const delta = this.#joins ? ` ${message.delta}` : message.delta;
    for (const character of characters) this.#open.push(character);
    if (characters.length) this.#heard = Math.max(this.#heard, (characters.at(-1).frame + 1) * this.#frame);
    this.#joins = false;
    this.#last = delta.at(-1);
    return { ...message, segment, delta, characters };
  }

  // The connection is gone: the segment that was open ends here. Null if it has no word.
  lost() {
    const groups = [[]];
    for (const c of this.#open) {
      if (c.text.trim()) groups.at(-1).push(c);
      if (c.text.endsWith(" ")) groups.push([]);
    }
    this.#open = [];
    const words = groups.filter((group) => group.length).map((group) => ({
      word: group.map((c) => c.text).join("").trim(),
      start: group[0].frame * this.#frame,
      end: (group.at(-1).frame + 1) * this.#frame,
      confidence: group.reduce((sum, c) => sum + (c.p || 1) * c.q, 0) / group.length, // not calibrated
    }));
    if (!words.length) return null;
    const text = words.map((word) => word.word).join(" ");
    const times = { start: words[0].start, end: words.at(-1).end };
    return { type: "segment", segment: this.#segments++, text, ...times, words, cut: true };
  }

  // A session begins anew: the event that says so, and the audio to send.
  resume() {
    const first = Math.min(this.#position(this.#heard), this.#end - (this.#end % this.#sampleBytes));
    const from = Math.max(first, this.#kept.length ? this.#kept[0].from : first);
    const whole = Math.ceil(from / this.#sampleBytes) * this.#sampleBytes; // where the first piece began inside a sample
    const missing = (whole - first) / this.#sampleBytes / this.#rate;
    this.#offset = this.#heard = this.#heard + missing;
    this.#firstSegment = this.#segments;
    this.#joins = this.#last !== "" && this.#last !== " ";
    const audio = this.#kept.filter((piece) => piece.from + piece.bytes.length > whole)
      .map((piece) => piece.bytes.subarray(Math.max(0, whole - piece.from)));
    return { event: { type: "reconnected", time: this.#offset, missing }, audio };
  }

  #position(seconds) { return Math.round(seconds * this.#rate) * this.#sampleBytes; }
}

export class StreamingClient {
  #url; #protocols; #start; #reconnectMs; #WebSocket; #continuity;
  #socket = null;
  #abandon = () => {}; // gives up a connection that is being made
  #given = 0; #draining = null; // bytes of audio that the socket was given; a promise while much of it waits there
  #turn = Promise.resolve(); // of who sends, in the order of the calls
  #broughtAt = 0; // when the last message came
  #calling = 0; #called = () => {}; // of send and finish: how many are under way; told of the next one
  #idle = null; // the server's error, thrown unless somebody sends again
  #events = [];
  #wake = () => {}; // called when there is news for whoever waits
  #news = null;
  #failure = null;
  #restoring = null; // a promise while the connection is being replaced
  #deadline = null; // set while connections are lost without text in between
  #standsSince = null; // a connection with which nothing is wrong
  #finishing = false; #ended = false;
  ready = null;
  warnings = [];

  constructor(url, options = {}) {
    const { sampleRate = 16000, encoding = "pcm_s16le", channels = 1, phrases = [], patient, pauseMs, apiKey } = options;
    const { reconnectSeconds = 30, keepSeconds = 300, WebSocket = globalThis.WebSocket } = options;
    if (!(encoding in SAMPLE_BYTES)) throw new TypeError(`encoding is one of ${Object.keys(SAMPLE_BYTES).join(", ")}`);
    if (!WebSocket) throw new TypeError("there is no WebSocket here: pass one as the option WebSocket");
    if (apiKey && !KEY.test(apiKey)) throw new TypeError("apiKey is of letters, digits and any of !#$%&'*+-.^_`|~");
    this.#url = url;
    this.#protocols = apiKey ? ["bearer", apiKey] : []; // browsers let nobody set headers
    this.#start = { type: "start", sample_rate: sampleRate, encoding, channels, phrases, patient, pause_ms: pauseMs };
    this.#reconnectMs = 1000 * reconnectSeconds;
    this.#WebSocket = WebSocket;
    this.#continuity = new Continuity(this.#start, keepSeconds);
  }

  get waitingBytes() { return this.#socket?.bufferedAmount ?? 0; }

  get reconnecting() { return this.#restoring !== null; }

  async open() {
    if (this.#failure || this.#socket) throw this.#failure ?? new StreamError("the client is open already");
    await this.#connect();
    return this.ready;
  }

  async send(audio) {
    if (!ArrayBuffer.isView(audio) && !Object.prototype.toString.call(audio).endsWith("ArrayBuffer]"))
      throw new TypeError("audio is an ArrayBuffer or a view of one");
    const all = ArrayBuffer.isView(audio)
      ? new Uint8Array(audio.buffer, audio.byteOffset, audio.byteLength) : new Uint8Array(audio);
    await this.#inTurn(async () => {
      for (let at = 0; at < all.length; at += PIECE_BYTES) {
        if (at) await this.#room();
        await this.#able();
        const piece = all.slice(at, at + PIECE_BYTES); // a copy: the caller may use its buffer again
        this.#continuity.sent(piece);
        if (this.#socket.readyState === OPEN) this.#give(piece); // else it is sent when the connection is restored
      }
    });
    if (all.length) await this.#room();
  }

  async finish() {
    await this.#inTurn(async () => {
      await this.#able();
      if (!this.#finishing) this.#awaitEnd();
      this.#finishing = true;
      if (this.#socket.readyState === OPEN) this.#socket.send('{"type":"finish"}');
    });
  }

  close() {
    this.#fail(new StreamError("the client was closed"));
    this.#abandon();
    this.#called(false);
    this.#socket?.close();
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      while (this.#events.length) {
        const event = this.#events.shift();
        yield event;
        if (event.type === "end") return;
      }
      if (this.#ended) return; // its end was read before
      if (this.#failure) throw this.#failure;
      if (!this.#socket) throw new StreamError("the client is not open");
      this.#news ??= new Promise((resolve) => (this.#wake = resolve));
      await this.#news;
      this.#news = null;
    }
  }

  // Resolves when audio can be taken.
  async #able() {
    if (!this.#socket && !this.#failure) throw new StreamError("the client is not open");
    while (this.#restoring) await this.#restoring;
    if (this.#ended) throw new StreamError("the stream has ended");
    if (this.#failure) throw this.#failure;
  }

  #inTurn(work) {
    this.#calling++;
    this.#called(true);
    const turn = this.#turn.then(work).finally(() => this.#calling--);
    this.#turn = turn.catch(() => {});
    return turn;
  }

  #give(piece) {
    this.#given += piece.length;
    this.#socket.send(piece);
  }

  #room() { return (this.#draining ??= this.#drained().finally(() => (this.#draining = null))); }

  // Resolves when at most a second of audio waits in the socket, or that is lost.
  async #drained() {
    const second = this.#start.sample_rate * this.#start.channels * SAMPLE_BYTES[this.#start.encoding];
    const socket = this.#socket;
    let taken = 0, since = Date.now();
    while (socket.bufferedAmount > second && socket.readyState === OPEN && socket === this.#socket && !this.#failure) {
      await pause(10);
      if (this.#given - socket.bufferedAmount > taken) {
        taken = this.#given - socket.bufferedAmount;
        since = Date.now();
      } else if (Date.now() - Math.max(since, this.#broughtAt) > STALLED_MS) return this.#drop(socket);
    }
  }

  // After the finish nothing is sent that would show that the connection is gone: it is lost if it brings nothing.
  async #awaitEnd() {
    let since = Date.now(), limit = STALLED_MS;
    while (!this.#ended && !this.#failure) {
      await new Promise((resolve) => setTimeout(resolve, 1000).unref?.()); // Node: it keeps no program alive
      if (this.#restoring) since = Date.now();
      if (Date.now() - Math.max(since, this.#broughtAt) < limit) continue;
      this.#drop(this.#socket);
      limit *= 2; // the server may as well be slow
    }
  }

  // A connection that is given up: it may take minutes until it is closed.
  #drop(socket) {
    socket.onmessage = socket.onclose = null;
    socket.close();
    if (!this.#ended && !this.#failure && socket === this.#socket) this.#restore();
  }

  #tell(event) {
    if (event) this.#events.push(event);
    this.#wake();
  }

  #fail(error) {
    this.#failure ??= error;
    this.#tell(this.#continuity.lost());
  }

  // A connection on which a session has begun.
  #connect() {
    return new Promise((resolve, reject) => {
      let refused = new StreamError(`no mocha-asr server answers at ${this.#url}`);
      let admitted = false, socket;
      try {
        socket = new this.#WebSocket(this.#url, this.#protocols);
      } catch (error) {
        return reject(new StreamError(error.message)); // no address
      }
      this.#abandon = () => {
        clearTimeout(timer);
        reject(this.#failure ?? refused);
        socket.onmessage = null;
        socket.onopen = () => socket.close();
        socket.close();
      };
      const timer = setTimeout(this.#abandon, READY_MS);
      socket.onopen = () => socket.send(JSON.stringify(this.#start));
      socket.onerror = () => { if (!admitted) socket.onclose(); }; // Node 20 has no close event after it
      socket.onmessage = ({ data }) => {
        const message = understood(data);
        if (!message) {
          refused = new StreamError("the server sent what this client does not know");
          if (admitted) this.#fail(refused);
          socket.close();
        } else if (admitted) this.#take(message);
        else if (message.type === "error") refused = new StreamError(message.message, message.code);
        else if (message.type === "ready") {
          admitted = true;
          clearTimeout(timer);
          this.#socket = socket;
          this.#abandon = () => {};
          this.#given = 0;
          this.#standsSince = Date.now();
          this.#continuity.ready(message);
          this.ready = message;
          resolve();
        }
      };
      socket.onclose = () => {
        clearTimeout(timer);
        if (!admitted) reject(refused);
        else if (!this.#ended && !this.#failure && socket === this.#socket) this.#restore();
      };
    });
  }

  #take(message) {
    this.#broughtAt = Date.now();
    if (message.type === "ready") return;
    if (message.type === "error") {
      if (!message.fatal) return this.warnings.push(message);
      this.#forgetOldLosses();
      this.#standsSince = null;
      const error = new StreamError(message.message, message.code);
      if (message.code === "idle" && this.#reconnectMs) this.#idle = error;
      else if (!PASSING.includes(message.code) || !this.#reconnectMs) this.#fail(error);
      return;
    }
    this.#deadline = null;
    this.#ended = message.type === "end";
    this.#tell(this.#continuity.received(message));
  }

  // What is lost after it stood for long is not the loss before once more.
  #forgetOldLosses() {
    if (this.#standsSince !== null && Date.now() - this.#standsSince > STOOD_MS) this.#deadline = null;
  }

  // What took longer than it can was a sleep of the machine, which is no time for trying.
  #excuse(since, longest) { this.#deadline += Math.max(0, Date.now() - since - longest - 1000); }

  // Whether there is, or soon comes, something to send: a stream may be idle because its machine slept.
  #sendsAgain() {
    if (this.#calling || this.#finishing || this.waitingBytes) return true;
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, this.#reconnectMs, false);
      this.#called = (sends) => {
        clearTimeout(timer);
        resolve(sends);
      };
    });
  }

  #restore() {
    this.#restoring ??= this.#reconnect().finally(() => (this.#restoring = null));
  }

  async #reconnect() {
    this.#tell(this.#continuity.lost());
    if (this.#idle && !(await this.#sendsAgain())) return this.#fail(this.#idle);
    this.#idle = null;
    this.#forgetOldLosses();
    this.#deadline ??= Date.now() + this.#reconnectMs;
    let wait = FIRST_PAUSE_MS, problem = "the connection was lost before the end of the stream";
    while (!this.#failure && Date.now() + wait < this.#deadline) {
      let since = Date.now();
      await pause(wait);
      this.#excuse(since, wait);
      since = Date.now();
      try {
        await this.#connect();
      } catch (error) {
        this.#excuse(since, READY_MS);
        if (error.code && !PASSING.includes(error.code)) return this.#fail(error);
        problem = `the connection was lost; ${error.message}`;
        wait = Math.min(2 * wait, MAX_PAUSE_MS);
        continue;
      }
      const { event, audio } = this.#continuity.resume();
      this.#tell(event);
      for (const piece of audio) this.#give(piece);
      if (this.#finishing) this.#socket.send('{"type":"finish"}');
      if (this.#failure) this.#socket.close(); // closed by the caller meanwhile
      return;
    }
    this.#fail(new StreamError(problem));
  }
}

const MAX_WORDS = 12, MAX_SECONDS = 6; // of one cue

function* cues(segments) {
  for (const { words } of segments) {
    let cue = [];
    for (const word of words) {
      if (cue.length && (cue.length === MAX_WORDS || word.end - cue[0].start > MAX_SECONDS)) {
        yield cue;
        cue = [];
      }
      cue.push(word);
    }
    if (cue.length) yield cue;
  }
}

function clock(seconds, comma) {
  const ms = Math.round(seconds * 1000);
  const two = (n) => String(n % 60).padStart(2, "0");
  const hours = String(Math.floor(ms / 3_600_000)).padStart(2, "0");
  return `${hours}:${two(Math.floor(ms / 60_000))}:${two(Math.floor(ms / 1000))}${comma}${String(ms % 1000).padStart(3, "0")}`;
}

function lines(cue, comma) {
  const words = cue.map((word) => word.word).join(" ");
  return `${clock(cue[0].start, comma)} --> ${clock(cue.at(-1).end, comma)}\n${words}\n`;
}

export function toSrt(segments) {
  return [...cues(segments)].map((cue, index) => `${index + 1}\n${lines(cue, ",")}`).join("\n");
}

export function toVtt(segments) {
  return ["WEBVTT\n", ...[...cues(segments)].map((cue) => lines(cue, "."))].join("\n");
}
