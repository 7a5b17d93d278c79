// The dialog in which an operator acts on one replica.

import { byId, setText } from "./dom.js";
import { sign } from "./format.js";
import { post } from "./session.js";

export const carryOut = async (replica, action, more = {}) => {
  const path = `replicas/${replica.stage_id}/${replica.replica_id}/${action}`;
  return (await (await post(path, { epoch: replica.epoch, ...more })).json()).done;
};

export class ActDialog {
  constructor(session) {
    this.session = session;
    this.dialog = byId("act");
    this.replica = null;
    this.again = null;
    for (const action of ["cordon", "uncordon", "drain", "kill"]) {
      byId(`act-${action}`).addEventListener("click", () => this.run(action));
    }
    byId("act-weight").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run("weight", { weight: Number(byId("weight").value) });
    });
    byId("act-own-weight").addEventListener("click", () => this.run("weight", { weight: null }));
    byId("act-sure").addEventListener("click", () => this.again?.());
  }

  show(replica) {
    this.replica = replica;
    setText(byId("act-title"), `Replica ${replica.name}`);
    this.say("");
    byId("weight").value = replica.weight;
    this.follow(replica);
    this.dialog.showModal();
  }

  // Keep what is shown of the replica up to date while the dialog is open.
  update(snapshot) {
    if (!this.dialog.open) return;
    const now = snapshot.stages.flatMap((stage) => stage.replicas).find((each) => each.name === this.replica.name);
    if (now === undefined) setText(byId("act-state"), "It is gone.");
    else if (now.epoch !== this.replica.epoch) setText(byId("act-state"), "It is gone, and another process has its name.");
    else this.follow(now);
  }

  follow(replica) {
    const where = `process ${replica.pid} on ${replica.host}`;
    setText(byId("act-state"), `${sign(replica.tone)} ${replica.state}, ${replica.load} of ${replica.capacity} slots in use, ${where}`);
    byId("act-cordon").hidden = replica.cordoned;
    byId("act-uncordon").hidden = !replica.cordoned;
    byId("act-kill").hidden = !this.session.can_kill;
  }

  say(text, isError = false) {
    const answer = byId("act-answer");
    setText(answer, text);
    answer.className = isError ? "error" : "";
    byId("act-sure").hidden = true;
  }

  async run(action, more = {}) {
    this.say("asked; waiting for its answer …");
    try {
      this.say(await carryOut(this.replica, action, more));
    } catch (error) {
      this.say(error.message, true);
      if (error.code === "not_sure") {
        this.again = () => this.run(action, { ...more, sure: true });
        byId("act-sure").hidden = false;
      }
    }
  }
}
