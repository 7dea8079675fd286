// Audio worklet: the microphone to the page, mono float32 in blocks of about 20 ms. Each sample of a block is the mean of
// `averaged` of the microphone's.
class Recorder extends AudioWorkletProcessor {
  #averaged; #block;
  #numHeard = 0; // of the microphone's samples, for this block

  constructor({ processorOptions: { averaged } }) {
    super();
    this.#averaged = averaged;
    this.#block = new Float32Array(Math.round(sampleRate / averaged / 50));
  }

  process([[channel]]) {
    for (const sample of channel ?? []) {
      this.#block[Math.floor(this.#numHeard++ / this.#averaged)] += sample / this.#averaged;
      if (this.#numHeard < this.#averaged * this.#block.length) continue;
      this.port.postMessage(this.#block.slice());
      this.#block.fill(0);
      this.#numHeard = 0;
    }
    return true;
  }
}
registerProcessor("recorder", Recorder);
