// Streams a file of 16-bit mono 16 kHz samples; prints each event as a line of JSON. Arguments: client module, address,
// file, options as JSON. After the first text it waits for a line on standard input before it goes on.
import fs from "node:fs";
import readline from "node:readline";

const [module, address, path, options] = process.argv.slice(2);
const { StreamingClient, StreamError } = await import(module);
const pcm = fs.readFileSync(path);
const input = readline.createInterface({ input: process.stdin });
const tell = (value) => console.log(JSON.stringify(value));

const client = new StreamingClient(address, JSON.parse(options));
try {
  tell(await client.open());
  const middle = Math.floor(pcm.length / 2) + 1; // inside a sample
  await client.send(pcm.subarray(0, middle));
  let rest = null;
  for await (const event of client) {
    tell(event);
    rest ??= event.type === "text" && (async () => {
      await new Promise((resolve) => input.once("line", resolve));
      await client.send(pcm.subarray(middle));
      await client.finish();
    })().catch((error) => tell({ type: "not sent", message: error.message })) || null;
  }
  tell({ type: "warnings", warnings: client.warnings });
} catch (error) {
  if (!(error instanceof StreamError)) throw error;
  tell({ type: "failed", code: error.code, message: error.message });
}
client.close();
input.close();
