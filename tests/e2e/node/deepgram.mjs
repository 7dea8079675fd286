// @deepgram/sdk: live and pre-recorded. Arguments: http://host:port, wav file, file of its samples.
import fs from "node:fs";
import { DeepgramClient } from "@deepgram/sdk";

const [address, wav, raw] = process.argv.slice(2);
const sockets = address.replace("http", "ws");
const environment = { base: address, production: sockets, agent: sockets, agentRest: address };
const client = new DeepgramClient({ apiKey: "any", environment });

const file = await client.listen.v1.media.transcribeFile(fs.createReadStream(wav), { model: "nova-3" });
const connection = await client.listen.v1.connect({
  model: "nova-3",
  encoding: "linear16",
  sample_rate: 16000,
  interim_results: "true",
  shouldReconnect: () => false,
});
connection.connect();
await connection.waitForOpen();
const pcm = fs.readFileSync(raw);
for (let at = 0; at < pcm.length; at += 8000) connection.sendMedia(pcm.subarray(at, at + 8000));
connection.sendCloseStream({ type: "CloseStream" });
const finals = [];
let interims = 0;
for await (const message of connection) {
  if (message.type === "Results" && !message.is_final) interims += 1;
  if (message.type === "Results" && message.is_final) finals.push(message.channel.alternatives[0].transcript);
  if (message.type === "Metadata") break;
}
const best = file.results.channels[0].alternatives[0];
console.log(JSON.stringify({ file: best.transcript, live: finals.join(" "), interims }));
