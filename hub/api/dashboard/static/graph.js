// The pipeline as a graph: the client, the stages by how far they are from it, and the client again.

import { setClass, setText, svg } from "./dom.js";
import { rate, seconds, sign } from "./format.js";

const BOX = { width: 168, height: 76 };
const END = { width: 84, height: 40 };
const GAP = { along: 116, across: 26 };
// Beside all stages, for what leads past some of them.
const LANE = 44;
const NARROW = matchMedia("(max-width: 600px)");

// In which column each stage stands: behind all that feed it.
function columns(stages, edges) {
  const depth = new Map(stages.map((stage) => [stage.stage_id, 0]));
  for (let round = 0; round < stages.length; round++) {
    for (const { from_stage: from, to_stage: to } of edges) {
      if (from !== null && to !== null) depth.set(to, Math.max(depth.get(to) ?? 0, (depth.get(from) ?? 0) + 1));
    }
  }
  return depth;
}

function layout(stages, edges, down) {
  const depth = columns(stages, edges);
  const levels = [[{ id: "in", box: END }]];
  for (const stage of stages) {
    const level = depth.get(stage.stage_id) + 1;
    (levels[level] ??= []).push({ id: String(stage.stage_id), box: BOX });
  }
  levels.push([{ id: "out", box: END }]);
  const along = down ? "height" : "width";
  const across = down ? "width" : "height";
  const gap = down ? 52 : GAP.along;
  const between = down ? 14 : GAP.across;
  const breadths = levels.map((level) => level.reduce((sum, each) => sum + each.box[across] + between, -between));
  const breadth = Math.max(...breadths);
  const levelOf = (id) => levels.findIndex((level) => level.some((each) => each.id === id));
  const ends = edges.map((edge) => [String(edge.from_stage ?? "in"), String(edge.to_stage ?? "out")]);
  const lane = ends.some(([from, to]) => levelOf(to) - levelOf(from) > 1) ? LANE + (down ? 30 : 0) : 0;
  const places = new Map();
  let at = 4;
  levels.forEach((level, index) => {
    let side = (breadth - breadths[index]) / 2 + 4 + (down ? 0 : lane);
    const length = Math.max(...level.map((each) => each.box[along]));
    for (const { id, box } of level) {
      const start = at + (length - box[along]) / 2;
      places.set(id, { x: down ? side : start, y: down ? start : side, level: index, ...box });
      side += box[across] + between;
    }
    at += length + gap;
  });
  const length = at - gap + 4;
  const whole = breadth + 8 + lane;
  return { places, width: down ? whole : length, height: down ? length : whole, lane: down ? whole - lane / 2 : LANE / 2 };
}

const keyOf = (edge) => `${edge.from_stage ?? "in"}>${edge.to_stage ?? "out"}`;

function worst(stage) {
  if (!stage.able || stage.failing || stage.replicas.some((replica) => replica.tone === "bad")) return "bad";
  if (stage.able < stage.wanted || stage.replicas.some((replica) => replica.tone === "warn")) return "warn";
  return "good";
}

export class Graph {
  constructor(parent) {
    this.parent = parent;
    this.shape = "";
    NARROW.addEventListener("change", () => (this.shape = ""));
  }

  update(snapshot) {
    const shape = JSON.stringify([snapshot.stages.map((stage) => stage.stage_id), snapshot.edges.map(keyOf), NARROW.matches]);
    if (shape !== this.shape) this.build(snapshot, shape);
    for (const stage of snapshot.stages) this.updateStage(stage);
    for (const edge of snapshot.edges) this.updateEdge(edge);
  }

  build({ stages, edges }, shape) {
    this.shape = shape;
    this.down = NARROW.matches;
    const { places, width, height, lane } = layout(stages, edges, this.down);
    const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      svg("path", { d: "M0 0L8 4L0 8z" }));
    this.labels = new Map();
    const wires = edges.map((edge) => this.wire(edge, places, lane));
    const boxes = [...places].map(([id, place]) => this.box(id, place, stages));
    const label = `The pipeline: ${stages.map((stage) => `stage ${stage.stage_id}`).join(", ")}`;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      svg("defs", {}, arrow), ...wires.map((wire) => wire.path), ...boxes, ...wires.map((wire) => wire.words));
    drawing.style.maxWidth = `${width * (this.down ? 1.1 : 1.25)}px`;
    this.parent.replaceChildren(drawing);
  }

  wire(edge, places, lane) {
    const from = places.get(String(edge.from_stage ?? "in"));
    const to = places.get(String(edge.to_stage ?? "out"));
    const { curve, x, y } = to.level - from.level > 1 ? this.past(from, to, lane) : this.straight(from, to);
    const path = svg("path", { d: curve, "marker-end": "url(#arrow)" });
    const upper = svg("text", { x, y: y - 4, "text-anchor": "middle" });
    const lower = svg("text", { x, y: y + 12, "text-anchor": "middle", class: "small" });
    const back = svg("rect", { class: "back", x: x - 30, y: y - 17, width: 60, height: 33, rx: 4 });
    const title = svg("title");
    const words = svg("g", {}, title, back, upper, lower);
    this.labels.set(keyOf(edge), { path, title, upper, lower });
    return { path, words };
  }

  // From one level to the next; and where its words stand.
  straight(from, to) {
    const [x1, y1, x2, y2] = this.down
      ? [from.x + from.width / 2, from.y + from.height, to.x + to.width / 2, to.y]
      : [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
    const bend = this.down ? (y2 - y1) / 2 : (x2 - x1) / 2;
    const curve = this.down
      ? `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`
      : `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
    return { curve, x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
  }

  // Past the levels in between, along the lane beside them.
  past(from, to, lane) {
    if (this.down) {
      const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x + to.width, to.y + to.height / 2];
      const curve = `M${x1} ${y1}C${lane} ${y1} ${lane} ${y1} ${lane} ${y1 + 40}V${y2 - 40}C${lane} ${y2} ${lane} ${y2} ${x2} ${y2}`;
      return { curve, x: lane, y: (y1 + y2) / 2 };
    }
    const [x1, y1, x2, y2] = [from.x + from.width / 2, from.y, to.x + to.width / 2, to.y];
    const curve = `M${x1} ${y1}C${x1} ${lane} ${x1} ${lane} ${x1 + 50} ${lane}H${x2 - 50}C${x2} ${lane} ${x2} ${lane} ${x2} ${y2}`;
    return { curve, x: (x1 + x2) / 2, y: lane };
  }

  box(id, place, stages) {
    const frame = svg("rect", { x: place.x, y: place.y, width: place.width, height: place.height, rx: 8 });
    const middle = place.x + place.width / 2;
    const line = (y, name) => svg("text", { x: middle, y: place.y + y, "text-anchor": "middle", class: name });
    const stage = stages.find((each) => String(each.stage_id) === id);
    if (!stage) {
      const word = line(25, "name");
      word.textContent = id === "in" ? "client" : "answer";
      return svg("g", { class: "end" }, frame, word);
    }
    const parts = { frame, name: line(19, "name"), state: line(38, ""), work: line(55, "small"), queue: line(69, "small") };
    this.labels.set(id, parts);
    return svg("g", {}, frame, parts.name, parts.state, parts.work, parts.queue);
  }

  updateStage(stage) {
    const parts = this.labels.get(String(stage.stage_id));
    const tone = worst(stage);
    setClass(parts.frame, tone);
    const name = stage.model || stage.engine;
    setText(parts.name, `${stage.stage_id} · ${name.length > 17 ? `${name.slice(0, 16)}…` : name}`);
    const wanted = stage.able < stage.wanted ? ` of ${stage.wanted}` : "";
    setText(parts.state, `${sign(tone)} ${stage.able}${wanted} ${stage.able === 1 && !wanted ? "replica" : "replicas"}`);
    setClass(parts.state, tone);
    setText(parts.work, stage.work.p50_s === null ? rate(stage.work.per_s) : `${rate(stage.work.per_s)} · ${seconds(stage.work.p50_s)}`);
    const slow = stage.work.p99_s === null ? "" : `p99 ${seconds(stage.work.p99_s)}, `;
    setText(parts.queue, `${slow}${stage.waiting ? `${stage.waiting} waiting` : "none waits"}`);
  }

  updateEdge(edge) {
    const parts = this.labels.get(keyOf(edge));
    setClass(parts.path, edge.flow.per_s ? "busy" : "");
    setText(parts.upper, rate(edge.flow.per_s));
    setText(parts.lower, edge.flow.p50_s === null ? "" : seconds(edge.flow.p50_s));
    const kind = edge.connector ? `${edge.connector}${edge.in_pieces ? ", in pieces" : ""}` : "";
    const p99 = edge.flow.p99_s === null ? "" : `; p99 ${seconds(edge.flow.p99_s)}`;
    setText(parts.title, `${kind}${p99}`);
  }
}
