// Samples to columns of a mel spectrogram, one every 10 ms. Knows no canvas.
export const BANDS = 64, COLUMNS_PER_SECOND = 100;
const LOWEST_HZ = 60, HIGHEST_HZ = 8000, FLOOR_DB = -85, CEILING_DB = -25;

const mel = (hz) => 2595 * Math.log10(1 + hz / 700);
const hertz = (m) => 700 * (10 ** (m / 2595) - 1);

export class Spectrum {
  #size; #window; #cosine; #sine; #reversed; #edges; #hop;
  #held; #filled = 0; #skip = 0;

  constructor(sampleRate) {
    const size = (this.#size = 2 ** Math.ceil(Math.log2(sampleRate / 40))); // the power of two from 25 ms on
    this.#hop = sampleRate / COLUMNS_PER_SECOND;
    this.#held = new Float32Array(size);
    const angle = (i) => (2 * Math.PI * i) / size;
    this.#window = Float32Array.from({ length: size }, (_, i) => 0.5 - 0.5 * Math.cos(angle(i)));
    this.#cosine = Float32Array.from({ length: size / 2 }, (_, i) => Math.cos(angle(i)));
    this.#sine = Float32Array.from({ length: size / 2 }, (_, i) => -Math.sin(angle(i)));
    const bits = Math.log2(size);
    this.#reversed = Uint16Array.from({ length: size }, (_, i) => {
      let r = 0;
      for (let bit = 0; bit < bits; bit++) r |= ((i >> bit) & 1) << (bits - 1 - bit);
      return r;
    });
    const [low, high] = [mel(LOWEST_HZ), mel(Math.min(HIGHEST_HZ, sampleRate / 2))];
    this.#edges = Array.from({ length: BANDS + 1 }, (_, b) => {
      return Math.round((hertz(low + ((high - low) * b) / BANDS) * size) / sampleRate);
    });
  }

  // Columns [BANDS] of bytes, 0 silent to 255 loud, that `samples` complete.
  push(samples) {
    const columns = [];
    for (const sample of samples) {
      this.#held[this.#filled++] = sample;
      if (this.#filled < this.#size) continue;
      columns.push(this.#column());
      const hop = Math.floor(this.#hop + this.#skip); // 44.1 and 22.05 kHz have no whole number of samples in 10 ms
      this.#skip += this.#hop - hop;
      this.#held.copyWithin(0, hop);
      this.#filled = this.#size - hop;
    }
    return columns;
  }

  #column() {
    const size = this.#size, re = new Float32Array(size), im = new Float32Array(size);
    for (let i = 0; i < size; i++) re[this.#reversed[i]] = this.#held[i] * this.#window[i];
    for (let half = 1; half < size; half *= 2) { // radix 2, in place
      const step = size / (2 * half);
      for (let start = 0; start < size; start += 2 * half) {
        for (let k = 0, t = 0; k < half; k++, t += step) {
          const a = start + k, b = a + half, c = this.#cosine[t], s = this.#sine[t];
          const x = re[b] * c - im[b] * s, y = re[b] * s + im[b] * c;
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        }
      }
    }
    const column = new Uint8Array(BANDS);
    for (let band = 0; band < BANDS; band++) {
      const first = this.#edges[band], last = Math.max(first + 1, this.#edges[band + 1]);
      let power = 0;
      for (let bin = first; bin < last; bin++) power = Math.max(power, re[bin] ** 2 + im[bin] ** 2);
      const db = 10 * Math.log10(power / (size / 4) ** 2 + 1e-12);
      column[band] = Math.max(0, Math.min(255, (255 * (db - FLOOR_DB)) / (CEILING_DB - FLOOR_DB)));
    }
    return column;
  }
}
