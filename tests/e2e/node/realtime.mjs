// openai: a Realtime transcription session. Arguments: http://host:port, file of 16-bit mono 16 kHz samples, folder
// with key.pem and cert.pem. This client only speaks TLS, so a proxy of a few lines stands before the server.
import fs from "node:fs";
import net from "node:net";
import tls from "node:tls";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [address, path, certificates] = process.argv.slice(2);
const [key, cert] = ["key.pem", "cert.pem"].map((name) => fs.readFileSync(`${certificates}/${name}`));
const proxy = tls.createServer({ key, cert }, (secure) => {
  const plain = net.connect(new URL(address).port, "127.0.0.1");
  for (const side of [secure, plain]) side.on("error", () => {});
  secure.pipe(plain).pipe(secure);
});
await new Promise((ready) => proxy.listen(0, "127.0.0.1", ready));

const client = new OpenAI({ baseURL: `https://127.0.0.1:${proxy.address().port}/v1`, apiKey: "any" });
const realtime = new OpenAIRealtimeWS({ intent: "transcription" }, client);
const input = "conversation.item.input_audio_transcription";
let deltas = "";

realtime.on("session.created", () => {
  const format = { type: "audio/pcm", rate: 16000 };
  const audio = { input: { format, turn_detection: null } };
  realtime.send({ type: "session.update", session: { type: "transcription", audio } });
});
realtime.on("session.updated", () => {
  const pcm = fs.readFileSync(path);
  for (let at = 0; at < pcm.length; at += 8000)
    realtime.send({ type: "input_audio_buffer.append", audio: pcm.subarray(at, at + 8000).toString("base64") });
  realtime.send({ type: "input_audio_buffer.commit" });
});
realtime.on(`${input}.delta`, (event) => (deltas += event.delta));
realtime.on(`${input}.completed`, (event) => {
  console.log(JSON.stringify({ text: event.transcript, deltas }));
  realtime.close();
  proxy.close();
});
realtime.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
