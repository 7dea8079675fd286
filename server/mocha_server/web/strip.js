// The picture of the sound: a spectrogram, every character at its frame, and the attention that produced it.
import { BANDS, COLUMNS_PER_SECOND, Spectrum } from "./spectrum.js";

const SECONDS_KEPT = 600, MARKS_KEPT = 20_000;
const PIXELS_PER_SECOND = 150;
const LANES = 4, LANE = 18, SOUND_TOP = LANES * LANE + 8, SOUND = 110, CHUNK_TOP = SOUND_TOP + SOUND + 4, CHUNK = 40;
const AXIS = CHUNK_TOP + CHUNK + 15;

// p = 0.5 is amber, 0.75 yellow, 1 teal, in the shades of the legend.
const SHADES = { light: [[180, 64, 10], [138, 109, 0], [11, 110, 99]], dark: [[255, 157, 92], [230, 207, 90], [92, 224, 204]] };

function shade(p, dark) {
  if (p <= 0) return dark ? "rgb(179 167 156)" : "rgb(100 90 82)";
  const stops = SHADES[dark ? "dark" : "light"], at = Math.max(0, Math.min(1, 2 * p - 1)) * 2;
  const low = Math.min(1, Math.floor(at)), part = at - low;
  return `rgb(${stops[low].map((from, i) => Math.round(from + part * (stops[low + 1][i] - from))).join(" ")})`;
}

export class Strip {
  #canvas; #readout; #latest; #pen; #picture;
  #spectrum = null; #columns; #count = 0; // columns heard in all; #columns is a ring
  #heard = 0; #rate = 1; // seconds; of the stream
  #marks = []; #frame = 0.04;
  #end = null; // seconds at the right edge; null follows the sound
  #chosen = null; #span = null;
  #dark = matchMedia("(prefers-color-scheme: dark)");
  #drawn = false;

  constructor(canvas, readout, latest) {
    this.#canvas = canvas;
    this.#readout = readout;
    this.#latest = latest;
    this.#pen = canvas.getContext("2d");
    this.#picture = document.createElement("canvas");
    this.#columns = new Uint8Array(SECONDS_KEPT * COLUMNS_PER_SECOND * BANDS);
    new ResizeObserver(() => this.#later()).observe(canvas);
    this.#dark.addEventListener("change", () => this.#later());
    latest.onclick = () => { canvas.focus(); this.follow(); }; // which hides the button
    this.#listen();
    this.#later();
  }

  get numMarks() { return this.#marks.length; }
  get seconds() { return this.#count / COLUMNS_PER_SECOND; } // that are drawn
  get heard() { return Math.max(this.#heard, this.seconds); } // of which the last 25 ms are yet to be drawn

  // A stream begins after what is there; the seconds at which it does, a whole number of its frames.
  begin(sampleRate, frameMs) {
    this.#spectrum = new Spectrum(sampleRate);
    this.#rate = sampleRate;
    this.#frame = frameMs / 1000;
    const base = Math.ceil(this.heard / this.#frame) * this.#frame;
    this.skip(base - this.seconds);
    this.#heard = base;
    this.follow();
    return base;
  }

  hear(samples) {
    this.#heard += samples.length / this.#rate;
    for (const column of this.#spectrum.push(samples)) this.#add(column);
    this.#later();
  }

  // Sound that was heard elsewhere.
  skip(seconds) {
    const columns = Math.round(seconds * COLUMNS_PER_SECOND), drawn = Math.min(columns, SECONDS_KEPT * COLUMNS_PER_SECOND);
    this.#count += columns - drawn;
    for (let i = 0; i < drawn; i++) this.#add(new Uint8Array(BANDS));
  }

  clear() {
    this.#count = this.#heard = 0;
    this.#marks = [];
    this.follow();
  }

  #add(column) {
    this.#columns.set(column, (this.#count % (SECONDS_KEPT * COLUMNS_PER_SECOND)) * BANDS);
    this.#count++;
  }

  mark(characters) {
    for (const character of characters) this.#marks.push({ ...character, lane: this.#lane(character) });
    if (this.#marks.length > MARKS_KEPT * 1.1) this.#marks.splice(0, this.#marks.length - MARKS_KEPT);
    this.#later();
  }

  // Show `word` {start, end} in the picture; null shows nothing special.
  show(word, move = false) {
    this.#span = word;
    if (move && word) this.#moveTo((word.start + word.end) / 2);
    this.#later();
  }

  follow() {
    this.#end = this.#chosen = null;
    this.#later();
  }

  // The first lane in which the letter does not cover an earlier one.
  #lane(character) {
    const recent = this.#marks.slice(-LANES * 2);
    const near = (lane) => recent.some((m) => m.lane === lane && (character.frame - m.frame) * this.#frame * PIXELS_PER_SECOND < 13);
    const free = [...Array(LANES).keys()].find((lane) => !near(lane));
    return free ?? (recent.at(-1).lane + 1) % LANES;
  }

  #later() {
    if (this.#drawn) return;
    this.#drawn = true;
    requestAnimationFrame(() => {
      this.#drawn = false;
      this.#draw();
    });
  }

  // Seconds at the right edge.
  #edge() { return this.#end ?? Math.max(this.seconds, this.#canvas.clientWidth / PIXELS_PER_SECOND); }

  #x(seconds) { return this.#canvas.clientWidth - (this.#edge() - seconds) * PIXELS_PER_SECOND; }

  // The x of the middle of a frame.
  #middle(frame) { return this.#x((frame + 0.5) * this.#frame); }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas, ratio = devicePixelRatio || 1;
    if (!width) return;
    if (this.#canvas.width !== Math.round(width * ratio) || this.#canvas.height !== Math.round(height * ratio)) {
      this.#canvas.width = Math.round(width * ratio);
      this.#canvas.height = Math.round(height * ratio);
    }
    const pen = this.#pen, style = getComputedStyle(this.#canvas);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.#latest.hidden = this.#end === null;
    this.#drawSound(width, style.color);
    if (this.#span) {
      const left = this.#x(this.#span.start);
      pen.fillStyle = style.getPropertyValue("--accent");
      pen.globalAlpha = 0.2;
      pen.fillRect(left, SOUND_TOP, Math.max(2, this.#x(this.#span.end) - left), CHUNK_TOP + CHUNK - SOUND_TOP);
      pen.globalAlpha = 1;
    }
    this.#drawAxis(width, style.getPropertyValue("--soft"), style.getPropertyValue("--line"));
    this.#drawMarks(width);
  }

  #drawSound(width, ink) {
    const kept = SECONDS_KEPT * COLUMNS_PER_SECOND, picture = this.#picture;
    const first = Math.floor((this.#edge() - width / PIXELS_PER_SECOND) * COLUMNS_PER_SECOND);
    const shown = Math.ceil((width / PIXELS_PER_SECOND) * COLUMNS_PER_SECOND) + 1;
    if (picture.width !== shown) Object.assign(picture, { width: shown, height: BANDS });
    const pen = picture.getContext("2d"), image = pen.createImageData(shown, BANDS);
    const pixels = new Uint32Array(image.data.buffer), [r, g, b] = ink.match(/\d+/g).map(Number);
    const colour = (b << 16) | (g << 8) | r; // little-endian RGBA, as every browser's machine is
    for (let c = 0; c < shown; c++) {
      const column = first + c;
      if (column < Math.max(0, this.#count - kept) || column >= this.#count) continue;
      const at = (column % kept) * BANDS;
      for (let band = 0; band < BANDS; band++)
        pixels[(BANDS - 1 - band) * shown + c] = ((this.#columns[at + band] * 0.8) << 24) | colour;
    }
    pen.putImageData(image, 0, 0);
    const scale = PIXELS_PER_SECOND / COLUMNS_PER_SECOND;
    this.#pen.imageSmoothingEnabled = true;
    this.#pen.drawImage(picture, this.#x(first / COLUMNS_PER_SECOND), SOUND_TOP, shown * scale, SOUND);
  }

  #drawAxis(width, soft, line) {
    const pen = this.#pen, edge = this.#edge();
    pen.fillStyle = line;
    pen.fillRect(0, SOUND_TOP + SOUND + 1, width, 1);
    pen.fillRect(0, CHUNK_TOP + CHUNK, width, 1);
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "left";
    for (let second = Math.max(0, Math.floor(edge - width / PIXELS_PER_SECOND)); second <= edge; second++) {
      pen.fillStyle = line;
      pen.fillRect(this.#x(second), CHUNK_TOP + CHUNK, 1, 5);
      pen.fillStyle = soft;
      pen.fillText(clock(second), this.#x(second) + 4, AXIS);
    }
  }

  #drawMarks(width) {
    const pen = this.#pen, dark = this.#dark.matches, frame = this.#frame * PIXELS_PER_SECOND;
    pen.textAlign = "center";
    for (const mark of this.#inView(width)) {
      const x = this.#middle(mark.frame), chosen = mark === this.#chosen;
      const baseline = (mark.lane + 1) * LANE;
      pen.fillStyle = shade(mark.p, dark);
      pen.globalAlpha = chosen ? 1 : 0.45;
      pen.fillRect(x - 0.5, baseline + 3, chosen ? 2 : 1, SOUND_TOP + SOUND - baseline - 3);
      pen.globalAlpha = chosen ? 1 : this.#chosen ? 0.25 : 0.6;
      mark.chunk.forEach((weight, i) => { // attention over the frames up to and including this one
        const left = this.#middle(mark.frame - mark.chunk.length + 1 + i) - frame / 2;
        pen.fillRect(left + 0.5, CHUNK_TOP + CHUNK - weight * (CHUNK - 4), frame - 1, weight * (CHUNK - 4));
      });
      pen.globalAlpha = 1;
      pen.font = `${chosen ? 700 : 600} 15px ui-monospace, monospace`;
      if (chosen) {
        pen.fillRect(x - 7, baseline - 14, 14, 18);
        pen.fillStyle = dark ? "#191614" : "#ffffff";
      }
      pen.fillText(mark.text === " " ? "␣" : mark.text, x, baseline - 1);
    }
  }

  // Marks from the last one backwards: a long session costs no more than a short one.
  #inView(width) {
    const first = (this.#edge() - width / PIXELS_PER_SECOND) / this.#frame - 8, last = this.#edge() / this.#frame + 1;
    const found = [];
    for (let i = this.#marks.length - 1; i >= 0 && this.#marks[i].frame >= first; i--)
      if (this.#marks[i].frame <= last) found.push(this.#marks[i]);
    return found.reverse();
  }

  #moveTo(seconds) {
    const wide = this.#canvas.clientWidth / PIXELS_PER_SECOND;
    if (seconds < this.#edge() && seconds > this.#edge() - wide) return;
    this.#end = Math.max(wide, seconds + wide / 2);
    if (this.#end >= this.seconds) this.#end = null;
  }

  #choose(mark) {
    if (mark === this.#chosen) return;
    this.#chosen = mark ?? null;
    if (mark) {
      const weights = mark.chunk.map((weight) => weight.toFixed(2)).join(" ");
      const letter = mark.text === " " ? "space" : mark.text;
      const p = mark.p > 0 ? `p ${mark.p.toFixed(2)}` : "at the end of the audio";
      this.#readout.value = `${letter} · ${mark.time.toFixed(2)} s · frame ${mark.frame} · ${p} · attention ${weights}`;
    }
    this.#later();
  }

  #listen() {
    const canvas = this.#canvas;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, end: this.#edge() };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held && Math.abs(event.clientX - held.x) > 3) this.#pan(held.end - (event.clientX - held.x) / PIXELS_PER_SECOND);
      const x = event.clientX - canvas.getBoundingClientRect().left;
      const distance = (mark) => Math.abs(this.#middle(mark.frame) - x);
      const near = this.#inView(canvas.clientWidth).filter((mark) => distance(mark) < 12);
      this.#choose(near.sort((a, b) => distance(a) - distance(b))[0]);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (held = null));
    canvas.addEventListener("wheel", (event) => {
      if (Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      this.#pan(this.#edge() + event.deltaX / PIXELS_PER_SECOND);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser's
      const at = this.#marks.indexOf(this.#chosen), last = this.#marks.length - 1;
      const next = { ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: at < 0 ? last : Math.min(last, at + 1), Home: 0, End: last }[event.key];
      if (event.key === "Escape") this.follow();
      if (next === undefined || last < 0) return;
      event.preventDefault();
      this.#choose(this.#marks[next]);
      this.#moveTo(this.#marks[next].time);
    });
  }

  #pan(end) {
    const wide = this.#canvas.clientWidth / PIXELS_PER_SECOND;
    const oldest = Math.max(0, this.seconds - SECONDS_KEPT);
    this.#end = end >= this.seconds ? null : Math.max(end, oldest + wide);
    this.#later();
  }
}

export function clock(seconds) {
  const whole = Math.floor(seconds), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
