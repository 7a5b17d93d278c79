// The try-it box: one question to the hub's own API, and the answer as it comes.

import { byId, el, keyed, setText } from "./dom.js";
import { seconds } from "./format.js";
import { carryOut } from "./act.js";
import { getJson, post } from "./session.js";
import { Player } from "./sound.js";

const WORDS = { text: "text", image: "a picture", audio: "sound", video: "a video" };
const NOTES = {
  omni: "",
  vllm: "This hub serves vLLM's own API: text in, text out.",
  "vllm-omni": "This hub serves vLLM-Omni's own API: what it takes beside text depends on the model.",
};

// The events of an answer that streams, as objects.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && !line.startsWith("data: [DONE]")) yield JSON.parse(line.slice(6));
    }
  }
}

export class TryIt {
  constructor(session, onWay) {
    this.session = session;
    this.request = "";
    byId("answer-way").addEventListener("click", () => onWay(this.request));
    this.snapshot = null;
    this.player = new Player(byId("wave"));
    this.abort = null;
    byId("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("ask-kill").addEventListener("click", () => byId("try-form").reportValidity() && this.ask({ kills: true }));
    byId("stop").addEventListener("click", () => this.abort?.abort());
  }

  // What this visitor may ask of this hub.
  offer() {
    const { acts, api, outputs, can_kill: canKill } = this.session;
    const choices = api === "vllm" ? [] : outputs.filter((name) => name in WORDS && name !== "video");
    keyed(byId("modalities"), ["legend", ...choices], (name) => name, (name) => this.makeChoice(name), () => {});
    byId("modalities").hidden = choices.length < 2;
    for (const id of ["ask", "prompt"]) byId(id).disabled = !acts;
    byId("ask-kill").hidden = !canKill;
    setText(byId("try-note"), acts ? NOTES[api] ?? "" : "Log in to ask: an answer is work for the replicas.");
  }

  makeChoice(name) {
    if (name === "legend") return el("span", { id: "modalities-name", class: "quiet" }, "Answer as");
    const box = el("input", { type: "checkbox", name: "modality", value: name, checked: true });
    return el("label", {}, box, WORDS[name]);
  }

  update(snapshot) {
    this.snapshot = snapshot;
  }

  async body(prompt) {
    const { api } = this.session;
    // Servers of others have names of their own for the model.
    const model = api === "omni" ? this.session.model : (await getJson("try/v1/models")).data[0].id;
    const body = { model, messages: [{ role: "user", content: prompt }], stream: true };
    if (api === "vllm") return body;
    const chosen = [...document.querySelectorAll("#modalities input:checked")].map((box) => box.value);
    if (chosen.length) body.modalities = chosen;
    if (api === "omni") body.include_timings = true;
    return body;
  }

  async ask({ kills = false } = {}) {
    const prompt = byId("prompt").value.trim();
    if (!prompt || this.abort !== null) return;
    this.begin(prompt);
    const began = performance.now();
    const facts = { prompt, began, first: null, timings: null, replicas: "", request: "", killed: "" };
    try {
      const response = await post("try/v1/chat/completions", await this.body(prompt), { signal: this.abort.signal });
      facts.replicas = response.headers.get("x-omni-replicas") ?? "";
      facts.request = response.headers.get("x-omni-request-id") ?? "";
      for await (const event of eventsOf(response)) {
        if (event.error) throw new Error(event.error.message);
        facts.first ??= (performance.now() - began) / 1000;
        facts.timings = event.timings_s ?? facts.timings;
        for (const choice of event.choices ?? []) this.show(choice.delta ?? {});
        if (kills && !facts.killed) facts.killed = await this.kill(facts.replicas);
      }
      this.tell(facts);
    } catch (error) {
      if (error.name === "AbortError") this.tell({ ...facts, stopped: true });
      else setText(byId("answer-error"), error.message);
    } finally {
      this.abort = null;
      byId("stop").hidden = true;
      byId("ask").disabled = !this.session.acts;
      byId("ask-kill").disabled = false;
      byId("answer").setAttribute("aria-busy", "false");
    }
  }

  begin(prompt) {
    this.abort = new AbortController();
    this.player.reset();
    byId("answer").hidden = false;
    byId("answer").setAttribute("aria-busy", "true");
    byId("answer-sound").hidden = true;
    byId("answer-way").hidden = true;
    byId("stop").hidden = false;
    byId("ask").disabled = true;
    byId("ask-kill").disabled = true;
    for (const id of ["answer-text", "answer-error"]) setText(byId(id), "");
    byId("answer-pictures").replaceChildren();
    byId("answer-facts").replaceChildren();
    this.prompt = prompt;
  }

  show(delta) {
    const parts = Array.isArray(delta.content) ? delta.content : [];
    if (typeof delta.content === "string") byId("answer-text").append(delta.content);
    for (const part of parts) {
      const url = part.image_url?.url ?? part.video_url?.url ?? "";
      if (!/^data:(image|video)\//.test(url)) continue;
      const alt = `the answer to: ${this.prompt}`;
      const node = part.image_url ? el("img", { src: url, alt }) : el("video", { src: url, controls: true, "aria-label": alt });
      byId("answer-pictures").append(node);
    }
    if (delta.audio?.data) {
      byId("answer-sound").hidden = false;
      this.player.play(delta.audio.data);
      const { seconds: length, pieces } = this.player;
      setText(byId("sound-state"), `♪ ${length.toFixed(1)} s of sound so far, in ${pieces} pieces`);
    }
  }

  // Kill the last of the replicas that work on this answer.
  async kill(replicas) {
    const working = replicas.split(", ");
    const all = this.snapshot?.stages.flatMap((stage) => stage.replicas) ?? [];
    const victim = all.findLast((replica) => working.includes(replica.name)) ?? all.findLast((replica) => replica.in_flight);
    if (victim === undefined) return "no replica was known to work on it: none was killed";
    try {
      return await carryOut(victim, "kill");
    } catch (error) {
      return `not killed: ${error.message}`;
    }
  }

  tell(facts) {
    const took = (performance.now() - facts.began) / 1000;
    facts.took ??= took;
    const lines = [facts.stopped ? "stopped: the replicas were told" : `all of it after ${seconds(facts.took)}, the first after ${seconds(facts.first)}`];
    if (facts.replicas) lines.push(`begun at ${facts.replicas}`);
    for (const { stage_id: id } of this.snapshot?.stages ?? []) {
      const [total, queue] = [facts.timings?.[`stage${id}.total`], facts.timings?.[`stage${id}.queue`]];
      if (total !== undefined) lines.push(`stage ${id}: ${seconds(total)}${queue === undefined ? "" : `, of that it waited ${seconds(queue)}`}`);
    }
    if (facts.killed) lines.push(facts.killed);
    if (facts.killed && !facts.stopped) lines.push("✔ the answer came to its end all the same");
    this.request = facts.request;
    byId("answer-way").hidden = !facts.request;
    if (!byId("answer-text").textContent && !byId("answer-pictures").children.length && !this.player.pieces) lines.unshift("nothing of what was asked for came out of this");
    keyed(byId("answer-facts"), lines.map((text, index) => ({ text, index })), (each) => each.index, () => el("li"), (node, each) => setText(node, each.text));
  }
}
