// What needs somebody, the numbers of this hub, and the events.

import { byId, el, keyed, setClass, setText } from "./dom.js";
import { clock, plural, rate, seconds, sign, UNKNOWN } from "./format.js";

const WORDS = { bad: "now", warn: "look" };

export function showNeeds({ needs, checks, at }) {
  const worst = needs.some((need) => need.tone === "bad") ? "bad" : needs.length ? "warn" : "good";
  setClass(byId("needs"), `card ${checks.at === null && !needs.length ? "" : worst}`);
  const none = byId("needs-none");
  none.hidden = needs.length > 0;
  setText(none, checks.at === null ? "Looking …" : checks.problem ? `${sign("warn")} Nothing is known to need you.` : `${sign("good")} Nothing needs you.`);
  keyed(byId("needs-list"), needs, (need) => `${need.topic}: ${need.text}`, makeNeed, () => {});
  const fine = checks.at === null ? "" : `${plural(checks.fine, "check")} fine, made ${Math.max(0, Math.round(at - checks.at))} s ago`;
  const problem = checks.problem ? `the checks can't be made now: ${checks.problem}` : "";
  setText(byId("needs-checked"), [problem, fine].filter(Boolean).join("; "));
}

function makeNeed(need) {
  const advice = need.advice ? el("span", { class: "advice" }, need.advice) : null;
  const command = need.command ? el("code", {}, need.command) : null;
  return el("li", {}, el("span", { class: `tone ${need.tone}` }, `${sign(need.tone)} ${WORDS[need.tone]}`), ` ${need.text}`, advice, command);
}

export function showNumbers({ traffic }) {
  const rows = [
    ["requests", rate(traffic.ended.per_s)],
    ["in flight", String(traffic.in_flight)],
    ["p50, p99", traffic.ended.p50_s === null ? UNKNOWN : `${seconds(traffic.ended.p50_s)}, ${seconds(traffic.ended.p99_s)}`],
    ["first output", seconds(traffic.first_output.p50_s)],
    ["failing", rate(traffic.failed_per_s)],
    ["so far", `${traffic.total_ok} ok, ${traffic.total_failed} failed`],
    ["retried, continued", `${traffic.total_retries}, ${traffic.total_continued}`],
  ];
  keyed(byId("numbers"), rows, ([name]) => name, ([name]) => el("div", {}, el("dt", {}, name), el("dd")), (node, [, value]) => setText(node.lastChild, value));
}

export function showEvents({ events }) {
  byId("events-none").hidden = events.length > 0;
  keyed(byId("events"), events, (event) => event.number, makeEvent, () => {});
}

function makeEvent(event) {
  const at = new Date(event.at * 1000).toISOString();
  return el("li", {}, el("time", { datetime: at }, clock(event.at)), el("span", { class: `tone ${event.tone}` }, `${sign(event.tone)} ${event.about}`), ` ${event.text}`);
}
