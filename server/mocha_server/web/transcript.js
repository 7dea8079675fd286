// The text: closed segments word by word, the open one as it grows. All of it is kept for copies and downloads; only
// the newest part is in the document, so that a long session does not make the page heavy.
import { toSrt, toVtt } from "./client/mocha-asr.js";

const MAX_PARAGRAPHS = 200, MAX_WORDS = 3000, MAX_OPEN = 4000; // in the document; the last in characters

export class Transcript {
  #box; #tip; #spoken; #strip;
  #segments = []; #open = ""; #paragraph = null;
  #from = -1; #until = 0; // seconds: what was said before is cleared, also what of it is yet to come; of the last text
  #words = new WeakMap(); // element → word

  constructor(box, tip, spoken, strip) {
    this.#box = box;
    this.#tip = tip;
    this.#spoken = spoken;
    this.#strip = strip;
    box.addEventListener("pointerover", (event) => this.#show(event.target));
    box.addEventListener("pointerleave", ({ relatedTarget }) => relatedTarget !== tip && this.#hide());
    tip.addEventListener("pointerleave", () => this.#hide());
    box.addEventListener("focusin", (event) => this.#show(event.target, true));
    box.addEventListener("focusout", (event) => this.#leave(event.target));
    box.addEventListener("click", (event) => this.#words.has(event.target) && this.#enter(event.target));
    box.addEventListener("keydown", (event) => this.#key(event));
    addEventListener("keydown", ({ key }) => key === "Escape" && this.#hide());
  }

  get text() {
    return [...this.#segments.map((segment) => segment.text), this.#open.trim()].filter(Boolean).join(" ");
  }

  as(format) {
    return { txt: () => `${this.text}\n`, srt: () => toSrt(this.#segments), vtt: () => toVtt(this.#segments) }[format]();
  }

  // Forget all that was said until `seconds`; if that is not given, until the last character there is.
  clear(seconds = this.#until) {
    this.#from = seconds;
    this.#segments = [];
    this.#open = "";
    this.#paragraph = null;
    this.#box.replaceChildren();
    this.#spoken.textContent = "";
  }

  add({ delta, characters }) {
    this.#until = characters.at(-1)?.time ?? this.#until;
    const kept = characters.filter(({ time }) => time > this.#from);
    if (kept.length < characters.length) delta = kept.map(({ text }) => text).join("");
    if (!delta) return;
    const below = this.#atEnd();
    if (!this.#paragraph) {
      this.#paragraph = document.createElement("p");
      this.#paragraph.className = "open";
      this.#paragraph.append(document.createTextNode(""));
      this.#box.append(this.#paragraph);
    }
    this.#open += delta;
    const node = this.#paragraph.firstChild;
    node.appendData(delta);
    if (node.length > MAX_OPEN) node.deleteData(0, node.length - MAX_OPEN / 2);
    if (below) this.#toEnd();
  }

  close(segment) {
    const kept = segment.words.filter(({ end }) => end > this.#from);
    if (kept.length < segment.words.length)
      segment = { ...segment, start: kept[0]?.start, words: kept, text: kept.map(({ word }) => word).join(" ") };
    const below = this.#atEnd(), paragraph = this.#paragraph ?? document.createElement("p");
    this.#open = "";
    this.#paragraph = null;
    if (!segment.text) return paragraph.remove();
    this.#segments.push(segment);
    paragraph.className = "";
    paragraph.replaceChildren();
    for (const word of segment.words.slice(-MAX_WORDS)) {
      const span = document.createElement("span");
      span.textContent = word.word;
      this.#words.set(span, word);
      paragraph.append(span, " ");
    }
    this.#box.append(paragraph);
    while (this.#box.childElementCount > MAX_PARAGRAPHS || this.#box.getElementsByTagName("span").length > MAX_WORDS)
      this.#box.firstElementChild.remove();
    this.#spoken.textContent = segment.text; // one announcement for each segment, none for each character
    if (below) this.#toEnd();
  }

  #atEnd() { return this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < 40; }
  #toEnd() { this.#box.scrollTop = this.#box.scrollHeight; }

  #show(element, move = false) {
    const word = this.#words.get(element);
    if (!word) return this.#hide();
    const p = word.confidence === undefined ? "" : ` · p ${word.confidence.toFixed(2)}`;
    this.#tip.textContent = `${word.start.toFixed(2)} – ${word.end.toFixed(2)} s${p}`;
    this.#tip.hidden = false;
    element.setAttribute("aria-describedby", this.#tip.id);
    const at = element.getBoundingClientRect(), base = this.#tip.offsetParent.getBoundingClientRect();
    const left = Math.min(at.left - base.left, base.width - this.#tip.offsetWidth - 8);
    this.#tip.style.left = `${Math.max(8, left)}px`;
    this.#tip.style.top = `${at.top - base.top - this.#tip.offsetHeight}px`; // the pointer can move to it
    this.#strip.show(word, move);
  }

  #hide() {
    this.#tip.hidden = true;
    this.#strip.show(null);
  }

  // Words can have the focus only while they do: Chromium selects no text from the edge of an element that can.
  #enter(word) {
    word.tabIndex = -1;
    word.focus();
  }

  #leave(element) {
    if (this.#words.has(element)) element.removeAttribute("tabindex");
    this.#hide();
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser's
    const spans = this.#box.getElementsByTagName("span"), last = spans.length - 1;
    const at = [].indexOf.call(spans, document.activeElement);
    const next = { ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.#box.focus();
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.#enter(spans[next]);
  }
}
