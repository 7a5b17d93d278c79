// Plays sound while it comes: pieces of 16-bit samples, each as a WAV file, one behind the other.

const AHEAD_S = 0.08;
// How much of the sound the picture of it shows, in samples of the drawing a second.
const MARKS_PER_S = 60;

// The samples of a WAV file from -1 to 1, one channel, and their rate.
export function readWav(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const tag = (at) => String.fromCharCode(...bytes.subarray(at, at + 4));
  if (bytes.length < 12 || tag(0) !== "RIFF" || tag(8) !== "WAVE") throw new Error("the sound is no WAV file");
  let [rate, channels, bits] = [0, 1, 16];
  for (let at = 12; at + 8 <= bytes.length;) {
    const [name, size] = [tag(at), view.getUint32(at + 4, true)];
    const body = at + 8;
    if (name === "fmt ") [channels, rate, bits] = [view.getUint16(body + 2, true), view.getUint32(body + 4, true), view.getUint16(body + 14, true)];
    if (name === "data") {
      if (!rate || bits !== 16) throw new Error(`sound of ${bits} bits can't be played here`);
      const end = Math.min(body + size, bytes.length);
      const count = Math.floor((end - body) / 2 / channels);
      const samples = new Float32Array(count);
      for (let index = 0; index < count; index++) samples[index] = view.getInt16(body + 2 * index * channels, true) / 32768;
      return { samples, rate };
    }
    at = body + size + (size % 2);
  }
  throw new Error("the WAV file has no samples");
}

export const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

export class Player {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = null;
    this.clear();
  }

  clear() {
    this.nextAt = 0;
    this.seconds = 0;
    this.pieces = 0;
    this.gaps = 0;
    this.marks = [];
  }

  // To be called by a click or a key: browsers let no page make a sound before.
  reset() {
    this.stop();
    this.context = typeof AudioContext === "undefined" ? null : new AudioContext();
    this.clear();
  }

  stop() {
    this.context?.close();
    this.context = null;
  }

  play(base64) {
    const { samples, rate } = readWav(fromBase64(base64));
    if (!samples.length) return;
    this.pieces += 1;
    this.seconds += samples.length / rate;
    const step = Math.max(1, Math.round(rate / MARKS_PER_S));
    for (let at = 0; at < samples.length; at += step) {
      this.marks.push(samples.subarray(at, at + step).reduce((most, each) => Math.max(most, Math.abs(each)), 0));
    }
    this.draw();
    if (this.context === null) return;
    this.context.resume();
    const buffer = this.context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(samples, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const now = this.context.currentTime;
    if (this.nextAt < now) {
      if (this.pieces > 1) this.gaps += 1;
      this.nextAt = now + AHEAD_S;
    }
    source.start(this.nextAt);
    this.nextAt += buffer.duration;
  }

  draw() {
    const { canvas, marks } = this;
    const pen = canvas.getContext("2d");
    const [width, height] = [canvas.width, canvas.height];
    const shown = marks.slice(-width / 3);
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = getComputedStyle(canvas).getPropertyValue("--blue");
    shown.forEach((mark, index) => {
      const size = Math.max(2, mark * height);
      pen.fillRect(index * 3, (height - size) / 2, 2, size);
    });
  }
}
