// Audio worklet: the microphone to the page, mono float32 in blocks of about 20 ms.
class Recorder extends AudioWorkletProcessor {
  #block = new Float32Array(128 * Math.ceil(sampleRate / 50 / 128));
  #filled = 0;

  process([[channel]]) {
    if (!channel) return true;
    this.#block.set(channel, this.#filled);
    this.#filled += channel.length;
    if (this.#filled === this.#block.length) {
      this.port.postMessage(this.#block.slice());
      this.#filled = 0;
    }
    return true;
  }
}
registerProcessor("recorder", Recorder);
