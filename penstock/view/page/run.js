// The page of one run.

import { chart, forget } from "./charts.js";
import { duration, el, fill, plural, shown, steps } from "./elements.js";
import { mark } from "./list.js";
import { timeline } from "./timeline.js";

const timelines = new Map(); // of the run that is shown: what a person has zoomed to stays
const USUAL = 10; // lines of a table that are shown at once

export function drawRun(place, run) {
  forget(place);
  const share = run.planned ? Math.min(1, run.steps / run.planned) : null;
  const bar = el("div");
  if (share !== null) bar.style.width = `${100 * share}%`;
  const of = share === null ? plural(run.steps, "step") : `${steps(run.steps)} of ${steps(run.planned)} steps`;
  const facts = [...run.facts, ...(run.versions ? [["versions", run.versions]] : [])];
  fill(place,
    el("p", {}, el("a", { href: "#/" }, "← all curves")),
    el("h1", {}, run.name),
    el("p", { class: "soft" }, `${of} · ${duration(run.seconds)} · `, mark(run)),
    share === null ? null : el("div", { class: "progress" }, bar),
    run.crash ? el("p", { class: "unread" }, "Learning broke down in this run: its batch lies in crash/.") : null);

  const jumps = el("nav", { class: "jumps", "aria-label": "Sections" });
  place.append(jumps);
  const section = (title, ...content) => {
    const real = content.filter(Boolean);
    if (!real.length) return;
    const head = el("h2", {}, title);
    place.append(head, ...real);
    jumps.append(el("button", { class: "plain", onclick: () => head.scrollIntoView({ behavior: "smooth" }) }, title));
  };
  const charts = new Map(run.sections.map((one) => [one.title, one.charts]));
  const metrics = (title, ...before) => {
    const some = charts.get(title) || [];
    charts.delete(title);
    const folded = some.filter((one) => one.folded);
    section(title, ...before, grid(some.filter((one) => !one.folded)), folded.length ? later(plural(folded.length, "more metric"), () => grid(folded)) : null);
  };
  section("Evaluations", evaluations(run.evaluations));
  section("Videos", run.videos.length ? el("div", { class: "videos" }, ...run.videos.map((name) => video(run.id, name))) : null);
  metrics("Returns and episodes");
  metrics("Load");
  metrics("Learners and runners", run.places.length ? table(["setting", "value"], run.places) : null);
  metrics("Faults", el("p", { class: "soft" }, charts.has("Faults") ? "Counts since the run began." : "None counted."));
  section("Timeline", run.timeline ? keptTimeline(run) : el("p", { class: "soft" }, run.timeline_note || "None recorded: --run.trace RUN/trace.json records one."));
  for (const title of [...charts.keys()]) metrics(title);
  section("Changes in the run", run.changes.length ? table(["step", "setting", "value"], run.changes) : null);
  section("Settings", run.settings.length ? folded(plural(run.settings.length, "setting"), table(["setting", "value"], run.settings, Infinity)) : el("p", { class: "soft" }, "Its config.json cannot be read."));
  section("Where it ran", el("dl", { class: "facts" }, el("dt", {}, "folder"), el("dd", {}, run.path), ...facts.flatMap(([name, text]) => [el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, text)])));
}

function grid(charts) {
  if (!charts.length) return null;
  const cells = charts.map(() => el("div"));
  const place = el("div", { class: "small" }, ...cells);
  charts.forEach(({ metric, x, y }, i) => chart(cells[i], metric, [{ name: metric, slot: 0, x, y }], { height: 170, legend: false }));
  return place;
}

// Content that is made when it is first opened.
function later(title, make) {
  const place = el("details", {}, el("summary", {}, title));
  place.addEventListener("toggle", () => { if (place.open && place.children.length === 1) place.append(make()); });
  return place;
}

function keptTimeline(run) {
  const key = run.id + JSON.stringify(run.timeline);
  if (!timelines.has(key)) {
    timelines.clear();
    timelines.set(key, timeline(run.timeline));
  }
  return timelines.get(key);
}

function evaluations(rows) {
  if (!rows.length) return null;
  const curves = el("div");
  const column = (name) => rows.map((row) => row[name]);
  chart(curves, "Return in evaluation", [{ name: "mean, with the least and the greatest return of an episode", slot: 0, x: column("step"), y: column("mean"), low: column("low"), high: column("high") }], { height: 240 });
  const cells = [...rows].reverse().map((row) => [row.step.toLocaleString("en"), row.mean, row.std, row.low, row.high, row.length, row.episodes].map((x) => (typeof x === "string" ? x : shown(x))));
  return el("div", {}, curves, el("p"), table(["step", "mean", "std", "min", "max", "length", "episodes"], cells, USUAL, true));
}

function video(id, name) {
  const step = /^0*(\d+)\.mp4$/.exec(name);
  return el("figure", {}, el("video", { src: `video/${id}/${encodeURIComponent(name)}`, controls: true, preload: "metadata", muted: true, loop: true, playsinline: true }),
    el("figcaption", {}, step ? `step ${Number(step[1]).toLocaleString("en")}` : name));
}

function folded(title, content) {
  return el("details", {}, el("summary", {}, title), content);
}

function table(head, rows, usual = USUAL * 2, numbers = false) {
  const line = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, { class: numbers ? "num" : "text" }, String(cell))));
  const part = (some) => el("div", { class: "wide" }, el("table", {}, el("thead", {}, line(head, "th")), el("tbody", {}, ...some.map((row) => line(row, "td")))));
  if (rows.length <= usual) return part(rows);
  return el("div", {}, part(rows.slice(0, usual)), folded(`all ${rows.length.toLocaleString("en")}`, part(rows)));
}
