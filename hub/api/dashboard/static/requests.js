// The slowest and the failed of the last requests, and the way of one of them as a waterfall.

import { byId, el, keyed, setText } from "./dom.js";
import { clock, seconds, sign } from "./format.js";
import { getJson } from "./session.js";

const EVERY_MS = 5000;
const LOOKED_AT = 200;
const SHOWN = 8;
const TONES = { ok: "good", failed: "bad", cancelled: "quiet", done: "good", lost: "bad", rejected: "warn", unsent: "warn", aborted: "quiet" };

const toneOf = (outcome) => TONES[outcome] ?? "quiet";

const size = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1 << 20 ? `${Math.round(bytes / 1024)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`);

export class Requests {
  constructor() {
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.follow());
  }

  start() {
    this.follow();
  }

  follow() {
    clearTimeout(this.timer);
    this.timer = null;
    if (!document.hidden && !byId("main").hidden) this.read();
  }

  async read() {
    try {
      const [last, failed] = await Promise.all([getJson(`receipts/requests?limit=${LOOKED_AT}`), getJson(`receipts/requests?failed=1&limit=${SHOWN}`)]);
      const slow = last.requests.filter((each) => each.outcome === "ok").sort((one, other) => other.took_s - one.took_s);
      this.show("slow", slow.slice(0, SHOWN));
      this.show("failed", failed.requests);
      setText(byId("requests-note"), "");
    } catch (error) {
      setText(byId("requests-note"), error.message);
    }
    this.timer = setTimeout(() => this.follow(), EVERY_MS);
  }

  show(kind, requests) {
    byId(`${kind}-none`).hidden = requests.length > 0;
    keyed(byId(`${kind}-list`), requests, (each) => each.request_id, (each) => this.line(each), () => {});
  }

  line(each) {
    const name = each.shown_id || each.request_id;
    const what = each.error || each.outcome;
    const button = el("button", { type: "button", "aria-haspopup": "dialog" },
      el("span", { class: `tone ${toneOf(each.outcome)}` }, `${sign(toneOf(each.outcome))} ${seconds(each.took_s)}`),
      el("span", { class: "quiet" }, `${clock(each.received_at)} · ${what}${each.replicas?.length ? ` · ${each.replicas.join(", ")}` : ""}`));
    button.setAttribute("aria-label", `The way of request ${name}`);
    button.addEventListener("click", () => this.open(each.request_id));
    return el("li", {}, button);
  }

  async open(name) {
    setText(byId("way-title"), `Request ${name}`);
    byId("way").replaceChildren();
    byId("way-dialog").showModal();
    try {
      const { receipts } = await getJson(`receipts/requests/${encodeURIComponent(name)}`);
      byId("way").replaceChildren(...wayOf(receipts[0]));
    } catch (error) {
      byId("way").replaceChildren(el("p", { class: "error" }, error.message));
    }
  }
}

// The parts of one attempt from its beginning to its end, as parts of the whole.
function partsOf(attempt, whole) {
  const end = attempt.ended_s ?? whole;
  const due = attempt.due_s ?? attempt.sent_s ?? end;
  const sent = attempt.sent_s ?? end;
  const first = attempt.first_output_s ?? attempt.first_piece_s ?? end;
  return [["waits", due, Math.min(sent, end)], ["begins", sent, Math.min(first, end)], ["makes", first, end]].filter(([, from, to]) => to > from);
}

export function wayOf(receipt) {
  const whole = receipt.took_s ?? Math.max(0, ...(receipt.attempts ?? []).map((each) => each.ended_s ?? each.sent_s ?? 0));
  const outcome = receipt.outcome || "under way";
  const state = receipt.error ? `${outcome}: ${receipt.error}${receipt.error_stage === undefined ? "" : ` of stage ${receipt.error_stage}`}` : outcome;
  const head = el("p", {}, el("span", { class: `tone ${toneOf(receipt.outcome)}` }, `${sign(toneOf(receipt.outcome))} ${state}`),
    ` after ${seconds(whole)}, received at ${clock(receipt.received_at)}${receipt.key ? `, key ${receipt.key}` : ""}`);
  const rows = (receipt.attempts ?? []).map((attempt) => attemptRow(attempt, whole));
  const transfers = (receipt.transfers ?? []).map((each) =>
    el("li", {}, `stage ${each.from_stage} → ${each.to_stage}: ${size(each.size_bytes ?? 0)}${(each.pieces ?? 1) > 1 ? ` in ${each.pieces} pieces` : ""}${each.connector ? ` by ${each.connector}` : ""}${each.seconds === undefined ? "" : `, fetched in ${seconds(each.seconds)}`}`));
  const legend = el("p", { class: "quiet" }, "light: it waits for a slot; hatched: until its first output; full: it puts out");
  return [head, el("ol", { class: "plain waterfall" }, ...rows), legend, el("ul", { class: "plain quiet" }, ...transfers)];
}

function attemptRow(attempt, whole) {
  const track = el("span", { class: "track", "aria-hidden": "true" });
  for (const [name, from, to] of partsOf(attempt, whole)) {
    const bar = el("span", { class: `bar ${name} ${toneOf(attempt.outcome)}` });
    bar.style.left = `${(100 * from) / whole}%`;
    bar.style.width = `${Math.max(0.5, (100 * (to - from)) / whole)}%`;
    track.append(bar);
  }
  const again = [attempt.is_retry ? "again" : "", attempt.continues ? "continues the answer" : "", attempt.repeats ? "makes the same again" : ""].filter(Boolean).join(", ");
  const outcome = attempt.outcome || "runs";
  const times = [["sent", attempt.sent_s], [`first ${attempt.modality || "output"}`, attempt.first_output_s], ["ended", attempt.ended_s]];
  const said = times.filter(([, at]) => at !== undefined).map(([what, at]) => `${what} ${seconds(at)}`).join(", ");
  return el("li", {}, el("span", {}, `stage ${attempt.stage} at `, el("strong", {}, attempt.replica || "nobody"), ` ${again ? `(${again}) ` : ""}`,
    el("span", { class: `tone ${toneOf(attempt.outcome)}` }, `${sign(toneOf(attempt.outcome))} ${outcome}`), attempt.reason ? ` ${attempt.reason}` : ""),
    track, el("span", { class: "quiet" }, said));
}
