// The replicas, as a group for each stage.

import { el, keyed, setClass, setText } from "./dom.js";
import { age, plural, seconds, sign } from "./format.js";

const HEADS = ["Replica", "State", "Load", "Where", "Up for", ""];

export class Replicas {
  constructor(parent, onAct, onKill) {
    this.parent = parent;
    this.onAct = onAct;
    this.onKill = onKill;
  }

  update(snapshot, session) {
    keyed(this.parent, snapshot.stages, (stage) => stage.stage_id, () => this.makeStage(), (node, stage) =>
      this.updateStage(node, stage, session));
  }

  makeStage() {
    const heads = HEADS.map((head) => el("th", { scope: "col" }, head));
    return el("div", { class: "stage" }, el("h3"), el("p", { class: "quiet" }), el("p", { class: "error" }),
      el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody")), el("p", { class: "quiet" }));
  }

  updateStage(node, stage, session) {
    const [title, about, wrong, table, more] = node.children;
    setText(title, `Stage ${stage.stage_id} · ${stage.model || stage.engine}`);
    const output = stage.output === "none" ? "" : `, answers with ${stage.output}`;
    const queue = stage.queue.p50_s === null ? "" : `; work waited ${seconds(stage.queue.p50_s)}`;
    setText(about, `${stage.engine}${output}: ${stage.able} of ${stage.wanted} wanted can take work, ${plural(stage.slots, "slot")}, ${stage.waiting} waiting${queue}`);
    setText(wrong, [stage.failing, stage.able < stage.registered ? stage.why_absent : ""].filter(Boolean).join("; "));
    setClass(wrong, stage.able && !stage.failing ? "quiet" : "error");
    table.hidden = !stage.replicas.length;
    setClass(table, session.can_kill ? "kills" : "");
    keyed(table.tBodies[0], stage.replicas, (replica) => `${replica.name}@${replica.epoch}`, (replica) => this.makeRow(replica),
      (row, replica) => this.updateRow(row, replica, session));
    setText(more, stage.more ? `and ${stage.more} more: omni replicas lists all` : "");
  }

  makeRow(first) {
    const act = el("button", { type: "button", "aria-haspopup": "dialog" }, "Act…");
    const kill = el("button", { type: "button", class: "danger" }, "Kill");
    const row = el("tr", {}, el("td", {}, el("strong")), el("td", { class: "state" }, el("span", { class: "tone" }), el("span", { class: "why" })),
      el("td", { class: "rest" }, el("span", { class: "load" }, el("meter", { min: 0 }), el("span"))),
      el("td", { class: "rest" }, el("span"), el("span", { class: "why" })), el("td", { class: "rest age" }),
      el("td", { class: "acts" }, el("span", { class: "buttons" }, kill, act)));
    row.replica = first;
    act.addEventListener("click", () => this.onAct(row.replica));
    kill.addEventListener("click", () => this.onKill(row.replica, kill));
    return row;
  }

  updateRow(row, replica, session) {
    row.replica = replica;
    const [name, state, load, where, since, acts] = row.cells;
    setText(name.firstChild, replica.name);
    const [word, why] = state.children;
    setClass(word, `tone ${replica.tone}`);
    const part = replica.progress === null ? "" : ` ${Math.round(replica.progress * 100)} %`;
    const weight = replica.weight !== 1 && replica.weight > 0 ? `, weight ${Number(replica.weight.toPrecision(4))}` : "";
    setText(word, `${sign(replica.tone)} ${replica.state}${part}${weight}`);
    setText(why, replica.why);
    const [meter, words] = load.firstChild.children;
    meter.max = Math.max(1, replica.capacity);
    meter.value = replica.load;
    meter.setAttribute("aria-label", `load of ${replica.name}`);
    setText(words, `${replica.load}/${replica.capacity}`);
    load.title = `${replica.in_flight} of this hub${replica.credits === null ? "" : `, ${plural(replica.credits, "credit")} left`}`;
    setText(where.children[0], `${replica.host} · ${replica.pid}`);
    setText(where.children[1], replica.device);
    setText(since, age(replica.age_s));
    acts.firstChild.hidden = !session.acts;
    const [kill, act] = acts.firstChild.children;
    kill.hidden = !session.can_kill || replica.state === "no session";
    kill.setAttribute("aria-label", `Kill ${replica.name}`);
    act.setAttribute("aria-label", `Act on ${replica.name}`);
  }
}
