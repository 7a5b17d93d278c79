// The dashboard: who looks, the stream of snapshots, and the parts of the page that show them.

import { ActDialog, carryOut } from "./act.js";
import { byId, setClass, setText } from "./dom.js";
import { age, sign } from "./format.js";
import { Graph } from "./graph.js";
import { showEvents, showNeeds, showNumbers } from "./lists.js";
import { Live } from "./live.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { logIn, logOut, readSession, session, takeLink } from "./session.js";
import { TryIt } from "./tryit.js";

const LINKS = {
  live: ["good", "live"], lost: ["bad", "hub not reached, trying again"], refused: ["bad", "not let in"],
  paused: ["quiet", "paused"], connecting: ["quiet", "connecting"],
};

const graph = new Graph(byId("graph"));
const dialog = new ActDialog(session);
const requests = new Requests();
const tryIt = new TryIt(session, (name) => requests.open(name));
const replicas = new Replicas(byId("stages"), (replica) => dialog.show(replica), kill);
const live = new Live(show, onLink);
let latest = null;

async function kill(replica, button) {
  button.disabled = true;
  try {
    await carryOut(replica, "kill");
  } catch (error) {
    dialog.show(replica);
    dialog.say(error.message, true);
  } finally {
    button.disabled = false;
  }
}

function show(snapshot) {
  latest = snapshot;
  const stale = snapshot.stale_s === null ? "" : ` · view stale for ${age(snapshot.stale_s)}`;
  setText(byId("where"), `namespace ${snapshot.namespace} · hub ${snapshot.hub_id} · ${snapshot.version} · revision ${snapshot.revision}${stale}`);
  document.title = `${snapshot.needs.length ? `(${snapshot.needs.length}) ` : ""}${snapshot.namespace} · omni-discovery`;
  showNeeds(snapshot);
  showNumbers(snapshot);
  graph.update(snapshot);
  const length = snapshot.traffic.window_s;
  setText(byId("graph-legend"), length ? `Rates and times of the last ${Math.round(length)} s, as this hub sees them; – is not known. On arrows: how often, and the median of the hand-off.` : "Rates are known after the first second.");
  replicas.update(snapshot, session);
  dialog.update(snapshot);
  tryIt.update(snapshot);
  showEvents(snapshot);
}

function onLink(state) {
  const [tone, word] = LINKS[state];
  setText(byId("link"), `${sign(tone)} ${word}`);
  setClass(byId("link"), `pill tone ${tone}`);
  if (state === "refused") setTimeout(enter, 2000);
}

async function enter() {
  try {
    await readSession();
  } catch {
    onLink("lost");
    setTimeout(enter, 2000);
    return;
  }
  byId("log-in").hidden = session.reads;
  byId("main").hidden = !session.reads;
  byId("read-only").hidden = session.acts;
  byId("log-out").hidden = !session.acts;
  tryIt.offer();
  if (session.reads) {
    live.start();
    requests.start();
  } else {
    live.stop();
    onLink("paused");
    byId("token").focus();
  }
  if (latest !== null && session.reads) show(latest);
}

async function tryToken(token) {
  setText(byId("log-in-error"), "");
  try {
    await logIn(token);
  } catch (error) {
    const wrong = error.code === "invalid_api_key";
    setText(byId("log-in-error"), wrong ? "This token opens nothing here. The log's line hub.admin_token names the file with the right one." : error.message);
  }
  byId("token").value = "";
}

byId("log-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  await tryToken(byId("token").value.trim());
  if (session.acts) await enter();
});
byId("show-log-in").addEventListener("click", () => {
  byId("log-in").hidden = false;
  byId("token").focus();
});
byId("log-out").addEventListener("click", async () => {
  await logOut();
  live.stop();
  await enter();
});

const { token, ask } = takeLink();
byId("prompt").value ||= ask;
if (token) await tryToken(token);
await enter();
