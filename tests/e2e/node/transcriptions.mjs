// openai: upload a file, plain and streamed. Arguments: http://host:port, file.
import fs from "node:fs";
import OpenAI from "openai";

const [address, path] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "any", maxRetries: 0 });
const ask = (options) => client.audio.transcriptions.create({ file: fs.createReadStream(path), model: "any", ...options });

const plain = await ask({ response_format: "verbose_json", timestamp_granularities: ["word", "segment"] });
let deltas = "";
let done = "";
for await (const event of await ask({ stream: true })) {
  if (event.type === "transcript.text.delta") deltas += event.delta;
  if (event.type === "transcript.text.done") done = event.text;
}
const refused = await client.audio.translations
  .create({ file: fs.createReadStream(path), model: "any" })
  .catch((error) => ({ status: error.status, code: error.code }));
console.log(JSON.stringify({ text: plain.text, words: plain.words, deltas, done, refused }));
