// Compiles only if the hand-written types say what the module does; never run.
import { StreamError, StreamingClient, toSrt, toVtt } from "mocha-asr";
import type { Character, ReconnectedEvent, SegmentEvent, StreamEvent } from "mocha-asr";

export async function use(samples: Int16Array): Promise<string> {
  const client = new StreamingClient("ws://localhost:8000/v1/stream", { sampleRate: 16000, apiKey: "k", WebSocket });
  const ready = await client.open();
  const rate: number = ready.sample_rate;
  await client.send(samples);
  await client.send(new ArrayBuffer(rate));
  await client.finish();
  const segments: SegmentEvent[] = [];
  let letters: Character[] = [];
  try {
    for await (const event of client) {
      const seen: StreamEvent = event;
      if (event.type === "text") letters = letters.concat(event.characters);
      else if (event.type === "segment") segments.push(event);
      else if (event.type === "reconnected") console.log((event satisfies ReconnectedEvent).missing, seen.type);
      else console.log(event.duration.toFixed(1), event.segments);
    }
  } catch (error) {
    if (error instanceof StreamError && error.code === "server_full") return error.message;
    throw error;
  }
  // @ts-expect-error encodings are these four
  new StreamingClient("ws://localhost", { encoding: "mp3" });
  return toSrt(segments) + toVtt(segments) + letters.map((c) => c.p.toFixed(2)).join();
}
