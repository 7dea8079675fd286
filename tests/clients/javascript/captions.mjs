// Segments as JSON on standard input; SubRip and WebVTT as a JSON object. Argument: client module.
import fs from "node:fs";

const { toSrt, toVtt } = await import(process.argv[2]);
const segments = JSON.parse(fs.readFileSync(0, "utf8"));
console.log(JSON.stringify({ srt: toSrt(segments), vtt: toVtt(segments) }));
