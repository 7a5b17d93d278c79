// The stream of snapshots: open only while the page is seen.

export class Live {
  constructor(onSnapshot, onState) {
    this.onSnapshot = onSnapshot;
    this.onState = onState;
    this.source = null;
    this.wanted = false;
    document.addEventListener("visibilitychange", () => this.follow());
  }

  start() {
    this.wanted = true;
    this.follow();
  }

  stop() {
    this.wanted = false;
    this.follow();
  }

  follow() {
    const open = this.wanted && !document.hidden;
    if (open && this.source === null) {
      this.source = new EventSource("live");
      this.source.onmessage = (event) => {
        this.onState("live");
        this.onSnapshot(JSON.parse(event.data));
      };
      this.source.onerror = () => {
        const ended = this.source?.readyState === EventSource.CLOSED;
        if (ended) this.close();
        this.onState(ended ? "refused" : "lost");
      };
    } else if (!open && this.source !== null) {
      this.close();
      this.onState("paused");
    }
  }

  close() {
    this.source?.close();
    this.source = null;
  }
}
