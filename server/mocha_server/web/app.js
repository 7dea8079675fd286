// The page: microphone or file in, characters out, over /v1/stream. No dependencies, no build.
import { StreamingClient } from "./client/mocha-asr.js";
import { askForKey, givenKey, isRefused, keyHeaders } from "./key.js";
import { Strip, clock } from "./strip.js";
import { Transcript } from "./transcript.js";

const DECODED_RATE = 16_000; // of files
const MAX_DECODED_BYTES = 8 << 20; // of a file; larger ones are decoded by the server, which holds none of them whole
const MAX_RATE = 48_000; // that the server takes
const LAGS = 15; // characters the lag is the median of
const UNHEARD_MS = 3000; // without a block of samples
const KEY_WANTED = "The server wants its key.";
const PROCESSING = ["echoCancellation", "noiseSuppression", "autoGainControl"];

const byId = (id) => document.getElementById(id);
export const strip = new Strip(byId("strip"), byId("readout"), byId("latest"));
export const transcript = new Transcript(byId("text"), byId("tip"), byId("spoken"), strip);

let stream = null; // {client, sampleRate, numSamples, base: seconds of earlier streams, frameShift, lag, note, done}
let starting = false; // from a press until the microphone runs
let microphone = null; // {context, node, to: stream, media, source, device: its choice}
let reading = null; // an AbortController while a file is read
let last = Promise.resolve(); // of what opens streams, one after the other

function inTurn(work) {
  const turn = last.then(work);
  last = turn.catch(() => {});
  return turn;
}

function status(message) {
  if (byId("status").textContent !== message) byId("status").textContent = message; // else it is read out again
}

// Lag: from the moment the audio of a character's frame was sent until the character is here.
class Lag {
  #sent = []; // {seconds of audio, at: milliseconds}
  #last = [];

  sent(seconds) {
    this.#sent.push({ seconds, at: performance.now() });
    if (this.#sent.length > 4000) this.#sent.splice(0, 2000);
  }

  received(characters) {
    for (const { time } of characters) {
      const piece = this.#sent.find(({ seconds }) => seconds >= time);
      if (piece) this.#last.push(performance.now() - piece.at);
    }
    this.#last.splice(0, this.#last.length - LAGS);
    if (!this.#last.length) return;
    const median = [...this.#last].sort((a, b) => a - b)[this.#last.length >> 1];
    byId("lag").value = median;
    byId("lag-text").textContent = median < 9950 ? `${Math.round(median)} ms` : `${Math.round(median / 1000)} s`;
  }
}

async function openStream(sampleRate) {
  const url = new URL("v1/stream", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const client = new StreamingClient(url, { sampleRate, patient: byId("patient").checked, apiKey: givenKey() });
  const ready = await client.open().catch(async (error) => {
    throw error.code === null && (await isRefused()) ? new Error(KEY_WANTED) : error;
  });
  const base = strip.begin(sampleRate, ready.frame_ms);
  byId("lag-text").textContent = "–";
  byId("lag").value = 0;
  const frameShift = Math.round((1000 * base) / ready.frame_ms);
  const opened = { client, sampleRate, numSamples: 0, base, frameShift, lag: new Lag(), note: "" };
  opened.done = receive(opened).catch(report).finally(() => {
    client.close();
    if (stream === opened) stream = null;
    if (!stream) stopMicrophone();
  });
  return (stream = opened);
}

async function receive(from) {
  const { client, lag, base, frameShift } = from;
  for await (const event of client) {
    if (event.type === "text") {
      const characters = event.characters.map((c) => ({ ...c, frame: c.frame + frameShift, time: c.time + base }));
      transcript.add({ ...event, characters });
      strip.mark(characters);
      lag.received(event.characters);
    } else if (event.type === "segment") transcript.close(after(base, event));
    else if (event.type === "reconnected") status(`Connected again, listening from ${clock(base + event.time)}.`);
    else if (event.type === "end") status(`${from.note}Finished: ${event.duration.toFixed(1)} s heard.`);
  }
}

// A segment as part of the page's whole text, which goes on from stream to stream.
function after(base, segment) {
  const later = (item) => ({ ...item, start: item.start + base, end: item.end + base });
  return { ...later(segment), words: segment.words.map(later) };
}

// Samples [N] float32 to the server and into the picture.
function send(to, samples) {
  to.numSamples += samples.length;
  const seconds = to.numSamples / to.sampleRate;
  to.lag.sent(seconds);
  strip.hear(samples);
  byId("heard").textContent = clock(to.base + seconds);
  if (to.client.reconnecting) status("The connection is lost; trying again.");
  return to.client.send(Int16Array.from(samples, (s) => Math.max(-32768, Math.min(32767, Math.round(32768 * s)))));
}

function showLevel(samples) {
  let power = 0;
  for (const s of samples) power += s * s;
  const db = 10 * Math.log10(power / samples.length + 1e-9);
  byId("level").value = Math.max(0, 1 + db / 60);
}

const REASONS = {
  NotAllowedError: "The microphone is not allowed.",
  NotFoundError: "There is no microphone.",
  OverconstrainedError: "That microphone is gone: choose another in the settings.",
  NotReadableError: "The microphone cannot be started.",
  AbortError: "The microphone cannot be started.",
};

async function openMedia() {
  const wanted = Object.fromEntries(PROCESSING.map((name) => [name, byId(name).checked]));
  const device = byId("device").value;
  const audio = { channelCount: 1, ...wanted, ...(device ? { deviceId: { exact: device } } : {}) };
  try {
    return await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    throw new Error(REASONS[error.name] ?? (error.message || error.name));
  }
}

async function listDevices() {
  const devices = (await navigator.mediaDevices.enumerateDevices()).filter((d) => d.kind === "audioinput" && d.deviceId);
  const select = byId("device"), chosen = select.value;
  select.replaceChildren(new Option("default", ""), ...devices.filter((d) => d.deviceId !== "default").map((d) => new Option(d.label || "microphone", d.deviceId)));
  select.value = devices.some((d) => d.deviceId === chosen) ? chosen : "";
}

// A device that is unplugged, or may no longer be heard, gives way to the default one.
function replaceWhenGone(media) {
  for (const track of media.getTracks())
    track.onended = () => {
      if (microphone?.media !== media) return;
      microphone.to.note = "The microphone is gone. ";
      byId("device").value = "";
      changeMedia().then(() => { if (microphone) microphone.to.note = ""; }, stopMicrophone);
    };
}

async function startMicrophone() {
  if (!navigator.mediaDevices) throw new Error("Browsers give the microphone to pages over https or on localhost only.");
  const media = await openMedia(); // which may take a person's time
  if (reading) {
    media.getTracks().forEach((track) => track.stop());
    throw new Error("A file is being read.");
  }
  return inTurn(() => listen(media));
}

async function listen(media) {
  await stream?.done;
  const context = new AudioContext(); // at the device's own rate: at another, Firefox connects no microphone
  const averaged = Math.ceil(context.sampleRate / MAX_RATE);
  try {
    await context.audioWorklet.addModule("recorder.js");
    const node = new AudioWorkletNode(context, "recorder", { processorOptions: { averaged } });
    const source = context.createMediaStreamSource(media);
    const to = await openStream(Math.round(context.sampleRate / averaged)); // last: nothing fails once it is open
    microphone = { context, node, to, media, source, device: byId("device").value };
    let unheard = false;
    const mute = () => {
      unheard = microphone?.to === to;
      if (unheard) status("No sound comes from the microphone.");
    };
    let watch = setTimeout(mute, UNHEARD_MS);
    node.port.onmessage = ({ data }) => {
      clearTimeout(watch);
      if (microphone?.to !== to) return; // late blocks come after a stop
      watch = setTimeout(mute, UNHEARD_MS);
      if (unheard) status("Listening.");
      unheard = false;
      showLevel(data);
      send(to, data).catch(() => {}); // the iteration says what is wrong
    };
    source.connect(node);
    replaceWhenGone(media);
  } catch (error) {
    media.getTracks().forEach((track) => track.stop());
    context.close();
    throw error;
  }
  showButton();
  status("Listening.");
  await listDevices();
}

// Another device, or other processing, in the same stream; where it cannot be heard, what was heard before goes on.
async function changeMedia() {
  if (!microphone) return;
  const media = await openMedia();
  let unused = media;
  try {
    if (!microphone) return;
    const source = microphone.context.createMediaStreamSource(media);
    source.connect(microphone.node);
    microphone.source.disconnect();
    unused = microphone.media;
    Object.assign(microphone, { media, source, device: byId("device").value });
    replaceWhenGone(media);
  } finally {
    unused.getTracks().forEach((track) => track.stop());
  }
}

function stopMicrophone() {
  if (!microphone) return;
  const { media, context, to } = microphone;
  microphone = null;
  media.getTracks().forEach((track) => track.stop());
  context.close();
  byId("level").value = 0;
  showButton();
  to.client.finish().catch(() => {}); // the iteration says what is wrong
}

function showButton() {
  byId("microphone").classList.toggle("running", microphone !== null);
  byId("microphone").textContent = reading ? "Stop reading" : microphone ? "Stop microphone" : "Start microphone";
}

// Files are read one after the other; the microphone gives way to the first.
function sendFile(file) {
  stopMicrophone();
  inTurn(async () => {
    reading = new AbortController();
    showButton();
    try {
      stopMicrophone(); // one that was started meanwhile
      await stream?.done;
      await read(file, reading.signal);
    } finally {
      reading = null;
      showButton();
    }
  }).catch((error) => (error.name === "AbortError" ? status("Stopped.") : report(error)));
}

async function read(file, signal) {
  status(`Reading ${file.name}.`);
  const samples = await decode(file);
  if (!samples) return upload(file, signal);
  signal.throwIfAborted();
  const to = await openStream(DECODED_RATE);
  status(`Listening to ${file.name}.`);
  for (let at = 0; at < samples.length && stream === to && !signal.aborted; at += DECODED_RATE / 4)
    await send(to, samples.subarray(at, at + DECODED_RATE / 4));
  await to.client.finish();
  await to.done;
}

// Mono samples at DECODED_RATE, or null for what this browser cannot decode.
async function decode(file) {
  if (file.size > MAX_DECODED_BYTES) return null;
  try {
    const audio = await new OfflineAudioContext(1, 1, DECODED_RATE).decodeAudioData(await file.arrayBuffer());
    const mono = new Float32Array(audio.length);
    for (let channel = 0; channel < audio.numberOfChannels; channel++)
      audio.getChannelData(channel).forEach((s, i) => (mono[i] += s / audio.numberOfChannels));
    return mono;
  } catch {
    return null;
  }
}

// The server reads more formats; there is no picture then.
async function upload(file, signal) {
  const form = new FormData();
  form.append("file", file);
  form.append("response_format", "verbose_json");
  status(`The server reads ${file.name}.`);
  const options = { method: "POST", headers: keyHeaders(), body: form, signal };
  const response = await fetch("v1/audio/transcriptions", options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (response.status === 401) {
    askForKey();
    throw new Error(KEY_WANTED);
  }
  const body = await response.json().catch(() => ({})); // of a proxy, which has its own pages
  if (!response.ok || !body.segments) throw new Error(body.error?.message ?? `The server answered ${response.status}.`);
  const base = strip.heard;
  for (const segment of body.segments) {
    const words = body.words.filter((word) => word.start >= segment.start && word.end <= segment.end);
    transcript.close(after(base, { ...segment, words }));
  }
  strip.skip(base - strip.seconds + body.duration);
  status(`Finished: ${body.duration.toFixed(1)} s heard.`);
}

function download(format) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([transcript.as(format)], { type: "text/plain" }));
  link.download = `transcript.${format}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function report(error) { status(error.message || error.name); }

async function copy() {
  if (!navigator.clipboard) throw new Error("Browsers let pages copy over https or on localhost only: take txt.");
  await navigator.clipboard.writeText(transcript.text);
  status("Copied.");
}

byId("microphone").onclick = async () => {
  if (reading) return reading.abort();
  if (microphone) {
    status("Finishing.");
    return stopMicrophone();
  }
  if (starting) return; // a second press would start a second one
  starting = true; // the button stays enabled: a disabled one loses the focus
  await startMicrophone().catch(report);
  starting = false;
};
byId("open").onclick = () => byId("file").click();
byId("file").onchange = ({ target }) => {
  for (const file of target.files) sendFile(file);
  target.value = ""; // so that the same file can be chosen again
};
byId("copy").onclick = () => copy().catch(report);
byId("clear").onclick = () => {
  if (!stream) strip.clear();
  transcript.clear(microphone || !stream ? strip.heard : undefined); // a file is sent long before it is read
};
for (const button of document.querySelectorAll("[data-format]")) button.onclick = () => download(button.dataset.format);
// What could not be had is not shown as if it were in use.
for (const name of PROCESSING)
  byId(name).onchange = ({ target }) => changeMedia().catch((error) => { target.checked = !target.checked; report(error); });
byId("device").onchange = ({ target }) =>
  changeMedia().catch((error) => { target.value = microphone?.device ?? ""; report(error); });
if (navigator.mediaDevices) {
  navigator.mediaDevices.ondevicechange = () => listDevices();
  listDevices();
}
isRefused().then((is) => { if (is) status(KEY_WANTED); });
addEventListener("keydown", ({ key, target }) => {
  if (key !== "Escape" || !byId("settings").open) return;
  if (byId("settings").contains(target)) byId("settings").firstElementChild.focus(); // its summary
  byId("settings").open = false;
});
addEventListener("dragover", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  byId("drop").hidden = false;
});
addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop").hidden = true; });
addEventListener("drop", (event) => {
  byId("drop").hidden = true;
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  for (const file of event.dataTransfer.files) sendFile(file);
});
