// The page: microphone or file in, characters out, over /v1/stream. No dependencies.
const byId = (id) => document.getElementById(id);
const MAX_PARAGRAPHS = 200; // older segments leave the page, not the copied text
const SECONDS_SHOWN = 8;

const strip = byId("strip");
const levels = []; // {time, level} of the last seconds
const marks = []; // {time, text, p}
let transcript = "";
let paragraph = null;
let socket = null;
let microphone = null;
let sentSamples = 0;
let streamRate = 16000;

function status(message) { byId("status").textContent = message; }

function addText(message) {
  if (!paragraph) {
    paragraph = byId("text").appendChild(document.createElement("p"));
    while (byId("text").childElementCount > MAX_PARAGRAPHS) byId("text").firstChild.remove();
  }
  paragraph.append(message.delta);
  transcript += message.delta;
  for (const c of message.characters) marks.push({ time: c.time, text: c.text, p: c.p });
  if (marks.length > 400) marks.splice(0, marks.length - 400);
}

function receive(event) {
  const message = JSON.parse(event.data);
  if (message.type === "text") addText(message);
  else if (message.type === "segment") paragraph = null;
  else if (message.type === "error") status(`${message.code}: ${message.message}`);
  else if (message.type === "end") { paragraph = null; status(`Finished: ${message.duration.toFixed(1)} s heard.`); }
}

function connect(sampleRate) {
  return new Promise((resolve, reject) => {
    const url = new URL("v1/stream", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const opened = new WebSocket(url);
    opened.onopen = () => {
      opened.send(JSON.stringify({ type: "start", sample_rate: sampleRate, encoding: "pcm_f32le" }));
      sentSamples = 0; streamRate = sampleRate; levels.length = marks.length = 0;
      resolve(opened);
    };
    opened.onmessage = receive;
    opened.onerror = () => { status("The server cannot be reached."); reject(new Error("unreachable")); };
    opened.onclose = () => { if (socket === opened) { socket = null; stopMicrophone(); } };
  });
}

function send(samples) {
  if (!microphone || !socket || socket.readyState !== WebSocket.OPEN) return; // late blocks come after a stop
  socket.send(samples);
  let sum = 0;
  for (const s of samples) sum += s * s;
  sentSamples += samples.length;
  const level = Math.min(1, Math.sqrt(sum / samples.length) * 3);
  levels.push({ time: sentSamples / streamRate, level });
  if (levels.length > 4000) levels.shift();
  byId("level").value = level;
}

async function startMicrophone() {
  const media = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  const context = new AudioContext();
  await context.audioWorklet.addModule("recorder.js");
  socket = await connect(context.sampleRate);
  const node = new AudioWorkletNode(context, "recorder");
  microphone = { media, context };
  node.port.onmessage = (event) => send(event.data);
  context.createMediaStreamSource(media).connect(node);
  byId("microphone").setAttribute("aria-pressed", "true");
  byId("microphone").textContent = "Stop microphone";
  status("Listening.");
}

function stopMicrophone() {
  if (!microphone) return;
  microphone.media.getTracks().forEach((track) => track.stop());
  microphone.context.close();
  microphone = null;
  byId("level").value = 0;
  byId("microphone").setAttribute("aria-pressed", "false");
  byId("microphone").textContent = "Start microphone";
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: "finish" }));
}

async function sendFile(file) {
  stopMicrophone();
  status(`Reading ${file.name}.`);
  const form = new FormData();
  form.append("file", file);
  form.append("response_format", "verbose_json");
  const response = await fetch("v1/audio/transcriptions", { method: "POST", body: form });
  const body = await response.json();
  if (!response.ok) { status(body.error.message); return; }
  for (const segment of body.segments) {
    addText({ delta: (transcript && !transcript.endsWith(" ") ? " " : "") + segment.text, characters: [] });
    paragraph = null;
  }
  status(`${file.name}: ${body.duration.toFixed(1)} s heard.`);
}

function draw() {
  const width = (strip.width = strip.clientWidth);
  const pen = strip.getContext("2d");
  const ink = getComputedStyle(document.body).color;
  const now = sentSamples / streamRate;
  const x = (time) => width * (1 - (now - time) / SECONDS_SHOWN);
  pen.fillStyle = ink;
  pen.globalAlpha = 0.5;
  for (const { time, level } of levels) {
    if (time > now - SECONDS_SHOWN) pen.fillRect(x(time), 75 - level * 35, 2, 1 + level * 70);
  }
  pen.globalAlpha = 1;
  pen.font = "16px system-ui";
  for (const { time, text, p } of marks) {
    if (time <= now - SECONDS_SHOWN) continue;
    pen.fillStyle = `hsl(${Math.round(240 * (p - 0.5))} 80% 50%)`; // red just above 0.5, green and blue towards 1
    pen.fillText(text, x(time) - 4, 22);
    pen.fillRect(x(time), 28, 1, 80);
  }
  requestAnimationFrame(draw);
}

function report(error) { status(error.name === "NotAllowedError" ? "The microphone is not allowed." : String(error.message)); }

byId("microphone").onclick = () => (microphone ? stopMicrophone() : startMicrophone().catch(report));
byId("file").onchange = (event) => event.target.files[0] && sendFile(event.target.files[0]).catch(report);
byId("copy").onclick = () => navigator.clipboard.writeText(transcript.trim()).then(() => status("Copied."), report);
byId("clear").onclick = () => { byId("text").replaceChildren(); transcript = ""; paragraph = null; };
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", () => document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  if (event.dataTransfer.files[0]) sendFile(event.dataTransfer.files[0]).catch(report);
});
draw();
