// The page: curves and the table of curves, a run by itself, and the look at files that have changed.

import { chart, forget, zoomOf } from "./charts.js";
import { duration, el, fill, get, redraw, shown, steps, swatch } from "./elements.js";
import { List } from "./list.js";
import { drawRun } from "./run.js";

const EVERY_MS = 3000;
const main = document.getElementById("main");
const status = document.getElementById("status");
const list = new List(() => show());
const state = { metrics: [], wall: false, signature: null, run: null, sort: { by: null, down: false }, plots: new Map(), turn: 0 };

function usual(metrics) {
  return ["rollout/ep_rew_mean", "self_play/elo", "eval/mean_reward"].find((metric) => metrics.includes(metric)) || metrics[0];
}

const route = () => location.hash.replace(/^#\/?/, "").split("/");

async function show(fresh = true) {
  state.turn += 1;
  const turn = state.turn;
  const [kind, id] = route();
  if (kind === "run" && id) return showRun(id, turn, fresh);
  state.run = null;
  if (!list.listing.runs.length) return showEmpty();
  if (kind === "table") return showTable();
  return showCurves(turn, fresh);
}

function tools(kind) {
  const choice = (name, pairs, chosen) => el("div", { class: "choice", role: "group", "aria-label": name },
    ...pairs.map(([text, act, value]) => el("button", { "aria-pressed": String(value === chosen), onclick: act }, text)));
  const go = (hash) => () => { location.hash = hash; };
  const tabs = choice("View", [["Curves", go("#/"), "curves"], ["Table", go("#/table"), "table"]], kind);
  if (kind === "table") return el("div", { class: "tools" }, tabs);
  const wall = (value) => () => { state.wall = value; show(); };
  const add = metricSelect("Add a chart", null, (metric) => { state.metrics.push(metric); show(); }, "+ chart");
  return el("div", { class: "tools" }, tabs, choice("Axis", [["Steps", wall(false), false], ["Wall time", wall(true), true]], state.wall),
    ...state.metrics.map((metric, i) => metricSelect(`Metric ${i + 1}`, metric, (other) => {
      if (other) state.metrics[i] = other;
      else state.metrics.splice(i, 1);
      show();
    })), add);
}

function metricSelect(label, chosen, changed, placeholder = null) {
  const of = new Map();
  for (const metric of list.listing.metrics) {
    const kind = metric.includes("/") ? metric.split("/")[0] : "others";
    if (!of.has(kind)) of.set(kind, []);
    of.get(kind).push(metric);
  }
  const select = el("select", { class: placeholder ? "add" : null, "aria-label": label, onchange: (event) => changed(event.target.value) },
    placeholder ? el("option", { value: "" }, placeholder) : null,
    !placeholder && state.metrics.length > 1 ? el("option", { value: "" }, "remove this chart") : null,
    ...[...of].map(([kind, names]) => el("optgroup", { label: kind }, ...names.map((name) => el("option", { value: name }, name)))));
  select.value = chosen || "";
  return select;
}

async function showCurves(turn, fresh) {
  const groups = list.shown();
  const names = new Map(groups.map((group) => [group.id, group.name]));
  const zooms = new Map();
  if (!fresh) for (const [key, plot] of state.plots) zooms.set(key, zoomOf(plot));
  const query = { x: state.wall ? "wall" : "steps", groups: [...names.keys()].join(",") };
  const answers = await Promise.all(state.metrics.map((metric) => get("chart", { ...query, metric })));
  if (turn !== state.turn) return;
  const grid = el("div", { class: "charts" });
  const key = JSON.stringify([list.listing.metrics, state.metrics, state.wall]);
  const kept = main.firstElementChild;
  forget(main);
  state.plots.clear();
  // An open list of metrics stays open while curves grow.
  if (!fresh && kept && kept.dataset.key === key) {
    while (kept.nextSibling) kept.nextSibling.remove();
    main.append(grid);
  } else {
    redraw(() => fill(main, tools("curves"), grid));
    main.firstElementChild.dataset.key = key;
  }
  if (!groups.length) grid.append(el("p", { class: "soft" }, "No curve is shown. Choose some in the list."));
  const panels = new Set();
  answers.forEach(({ curves }) => curves.forEach((curve) => panels.add(curve.panel)));
  state.metrics.forEach((metric, i) => {
    const { curves } = answers[i];
    const here = new Map();
    for (const curve of curves) here.set(curve.panel, [...(here.get(curve.panel) || []), curve]);
    if (groups.length && !curves.length) grid.append(el("div", {}, el("h3", {}, metric), el("p", { class: "soft" }, "No run that is shown has this metric.")));
    for (const [panel, some] of here) {
      const place = el("div");
      grid.append(place);
      const title = panels.size > 1 && panel ? `${panel}: ${metric}` : metric;
      const drawn = some.map((curve) => ({ ...curve, slot: list.slots.get(curve.group), name: nameOf(curve, names) }));
      const several = drawn.filter((curve) => curve.policy !== null);
      several.forEach((curve, at) => { if (at) curve.slot = list.slots.size + at; });
      const wide = here.size * state.metrics.length === 1;
      const key = `${metric} ${panel} ${state.wall}`;
      state.plots.set(key, chart(place, title, drawn, { wall: state.wall, height: wide ? Math.max(280, Math.min(520, innerHeight - 260)) : 300, zoom: zooms.get(key) }));
      if (wide) grid.style.gridTemplateColumns = "minmax(0, 1fr)";
    }
  });
  if (grid.querySelector(".legend") && answers.some(({ curves }) => curves.some((curve) => curve.low))) {
    main.append(el("p", { class: "soft" }, el("br"), "Seeds: interquartile mean, with its 95% bootstrap interval. Drag over a chart to look closer, double-click for the whole."));
  }
  document.body.dataset.ready = String(Math.round(performance.now()));
}

function nameOf(curve, names) {
  const seeds = curve.seeds > 1 ? ` (${curve.seeds} seeds${curve.low ? "" : ", the longest shown"})` : "";
  const policy = curve.policy === null ? "" : `, ${curve.policy || "all agents"}`;
  return names.get(curve.group) + policy + seeds;
}

function showTable() {
  const groups = list.fitting();
  const settings = [...new Set(groups.flatMap((group) => Object.keys(group.settings)))];
  const mean = (group, key) => {
    const values = group.runs.map((id) => list.runs.get(id)[key]).filter((x) => x !== null && x !== undefined);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  };
  const columns = [
    { name: "curve", of: (group) => group.name },
    { name: "environment", of: (group) => group.env },
    { name: "runs", of: (group) => group.runs.length, number: true },
    { name: "steps", of: (group) => mean(group, "steps"), number: true, text: steps },
    { name: "return", of: (group) => mean(group, "return"), number: true },
    { name: "evaluation", of: (group) => mean(group, "evaluation"), number: true },
    { name: "wall time", of: (group) => mean(group, "hours"), number: true, text: (hours) => duration(hours * 3600) },
    ...settings.filter((name) => name !== "env" && name !== "algo").map((name) => ({ name, of: (group) => group.settings[name] ?? "?" })),
  ];
  const { by, down } = state.sort;
  const column = columns.find((one) => one.name === by);
  if (column) groups.sort((a, b) => compare(column.of(a), column.of(b), down));
  const head = columns.map(({ name, number }) => el("th", { class: number ? "num" : null, "aria-sort": name === by ? (down ? "descending" : "ascending") : null },
    el("button", { onclick: () => { state.sort = { by: name, down: name === by ? !down : Boolean(number) }; showTable(); } }, name === by ? `${name} ${down ? "▾" : "▴"}` : name)));
  const rows = groups.map((group) => el("tr", {}, ...columns.map((one, i) => {
    const value = one.of(group);
    const text = value === null ? "–" : one.text ? one.text(value) : one.number ? shown(value) : String(value);
    const slot = list.slots.get(group.id) ?? null;
    return el("td", { class: one.number ? "num" : i === 0 ? "curve" : "cell", title: i > 0 && text.length > 28 ? text : null }, i === 0 && slot !== null ? swatch(slot) : null, text);
  })));
  forget(main);
  redraw(() => fill(main, tools("table"), el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    el("p", { class: "soft" }, el("br"), "Means over the runs of a curve. Settings are those that differ.")));
  document.body.dataset.ready = "table";
}

function compare(a, b, down) {
  const numbers = [a, b].map((x) => (typeof x === "number" ? x : Number.parseFloat(x)));
  const order = numbers.some(Number.isNaN) ? String(a).localeCompare(String(b), "en", { numeric: true }) : numbers[0] - numbers[1];
  return (a === null) - (b === null) || (down ? -order : order);
}

async function showRun(id, turn, fresh) {
  try {
    const run = await get("run", !fresh && state.run && state.run.id === id ? { id, seen: state.run.signature } : { id });
    if (turn !== state.turn || run.unchanged || [...main.querySelectorAll("video")].some((one) => !one.paused)) return;
    const top = main.scrollTop;
    const open = [...main.querySelectorAll("details")].map((one) => one.open);
    drawRun(main, run);
    if (!fresh) {
      [...main.querySelectorAll("details")].forEach((one, i) => { one.open = Boolean(open[i]); });
      main.scrollTop = top;
    } else main.scrollTop = 0;
    state.run = run;
  } catch (error) {
    if (!error.refused) throw error;
    forget(main);
    fill(main, el("p", {}, el("a", { href: "#/" }, "← all curves")), el("p", {}, error.message));
  }
  document.body.dataset.ready = "run";
}

function showEmpty() {
  forget(main);
  fill(main, el("div", { class: "empty" }, el("h1", {}, "No runs yet"), el("p", {}, `There is no run in ${list.listing.folder} or below. They appear here as they begin, for example by`),
    el("p", {}, el("code", {}, "penstock train ppo --env CartPole-v1"))));
  document.body.dataset.ready = "empty";
}

async function look() {
  try {
    const listing = await get("runs", state.signature ? { seen: state.signature } : {});
    status.className = "";
    status.textContent = "live";
    const first = state.signature === null;
    if (!listing.unchanged) {
      state.signature = listing.signature;
      document.getElementById("folder").textContent = listing.folder;
      document.title = `penstock: ${listing.folder}`;
      list.update(listing);
      if (!state.metrics.length && listing.metrics.length) state.metrics = [usual(listing.metrics)];
    }
    if (!listing.unchanged || route()[0] === "run") await show(first);
  } catch (error) {
    status.className = "lost";
    status.textContent = error.refused ? error.message : "penstock view has ended";
  }
}

async function forever() {
  if (!document.hidden) await look();
  setTimeout(forever, EVERY_MS);
}

addEventListener("hashchange", () => show().catch(() => {}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { list.draw(); show().catch(() => {}); });
forever();
