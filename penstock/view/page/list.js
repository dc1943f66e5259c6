// The list of curves and their runs: which are shown, by which line, and the filter.

import { COLOURS, el, fill, plural, redraw, shown, steps, swatch } from "./elements.js";

const FIRST = COLOURS; // curves shown at the start

export class List {
  constructor(changed) {
    this.changed = changed;
    this.listing = { groups: [], runs: [], metrics: [] };
    this.slots = new Map(); // id of a curve -> its line; absent: not shown
    this.open = new Set();
    this.known = new Set();
    this.words = "";
    document.getElementById("filter").addEventListener("input", (event) => {
      this.words = event.target.value;
      this.draw();
      this.changed();
    });
  }

  update(listing) {
    const first = this.known.size === 0;
    this.listing = listing;
    this.runs = new Map(listing.runs.map((run) => [run.id, run]));
    const ids = new Set(listing.groups.map((group) => group.id));
    for (const id of [...this.slots.keys()]) if (!ids.has(id)) this.slots.delete(id);
    for (const group of listing.groups) {
      if (!this.known.has(group.id) && (first || listing.groups.length <= FIRST) && this.slots.size < FIRST) this.show(group.id);
      this.known.add(group.id);
    }
    this.draw();
  }

  show(id) {
    const taken = new Set(this.slots.values());
    let slot = 0;
    while (taken.has(slot)) slot += 1;
    this.slots.set(id, slot);
  }

  toggle(id) {
    if (!this.slots.delete(id)) this.show(id);
    this.draw();
    this.changed();
  }

  // Curves of which a run fits every word of the filter.
  fitting() {
    const words = this.words.toLowerCase().split(/\s+/).filter(Boolean);
    return this.listing.groups.filter((group) => words.every((word) => group.runs.some((id) => fits(group, this.runs.get(id), word))));
  }

  shown() {
    return this.fitting().filter((group) => this.slots.has(group.id));
  }

  draw() {
    redraw(() => this.drawn());
  }

  drawn() {
    const fitting = this.fitting();
    const { groups, runs } = this.listing;
    const count = fitting.reduce((sum, group) => sum + group.runs.length, 0);
    const all = fitting.length === groups.length;
    const text = all ? `${plural(groups.length, "curve")}, ${plural(count, "run")}` : `${fitting.length} of ${plural(groups.length, "curve")}, ${plural(count, "run")}`;
    const set = (ids) => () => {
      for (const group of fitting) this.slots.delete(group.id);
      for (const id of ids) if (!this.slots.has(id)) this.show(id);
      this.draw();
      this.changed();
    };
    fill(document.getElementById("count"), el("span", {}, runs.length ? text : ""),
      groups.length ? el("button", { class: "plain", onclick: set(fitting.map((group) => group.id)) }, "all") : null,
      groups.length ? el("button", { class: "plain", onclick: set([]) }, "none") : null);
    const unread = runs.filter((run) => run.error);
    fill(document.getElementById("groups"), ...fitting.map((group) => this.group(group)),
      ...unread.map((run) => el("p", { class: "unread" }, `${run.name} ${run.error}`)));
  }

  group(group) {
    const runs = group.runs.map((id) => this.runs.get(id));
    const slot = this.slots.has(group.id) ? this.slots.get(group.id) : null;
    const open = this.open.has(group.id);
    const expand = () => {
      if (!this.open.delete(group.id)) this.open.add(group.id);
      this.draw();
    };
    const returns = runs.map((run) => run.return).filter((x) => x !== null && x !== undefined);
    const mean = returns.length ? returns.reduce((a, b) => a + b) / returns.length : null;
    const seeds = new Set(runs.map((run) => run.seed ?? run.id)).size;
    const count = seeds === runs.length ? plural(seeds, "seed") : `${plural(runs.length, "run")} of ${plural(seeds, "seed")}`;
    const of = [group.name.includes(group.env) ? null : group.env, runs.length > 1 ? count : null].filter(Boolean).join(" · ");
    return el("div", { class: slot === null ? "group off" : "group" },
      el("div", { class: "head" },
        el("button", { class: "toggle", "aria-pressed": String(slot !== null), "aria-label": `Show ${group.name}`, title: slot === null ? "show" : "hide", onclick: () => this.toggle(group.id) }, swatch(slot)),
        el("div", {}, el("div", { class: "title" }, group.name), el("div", { class: "of" }, of, ...states(runs))),
        el("span", { class: "last num", title: "mean return of the last training episodes" }, shown(mean)),
        el("button", { class: "more", "aria-expanded": String(open), "aria-label": `Runs of ${group.name}`, onclick: expand }, open ? "▾" : "▸")),
      open ? el("ul", {}, ...runs.map((run) => el("li", {}, el("a", { href: `#/run/${run.id}` }, run.name), el("span", { class: "soft num" }, steps(run.steps)), mark(run)))) : null);
  }
}

function states(runs) {
  const found = [];
  const running = runs.filter((run) => run.state === "running").length;
  const killed = runs.filter((run) => run.state === "killed").length;
  const faults = runs.reduce((sum, run) => sum + (run.faults || 0), 0);
  if (running) found.push(el("span", { class: "mark running" }, ` · ${running === runs.length ? "" : `${running} `}running`));
  if (killed) found.push(el("span", { class: "mark killed" }, ` · ${killed === runs.length ? "" : `${killed} `}killed`));
  if (faults) found.push(el("span", { class: "mark bad" }, ` · ${plural(faults, "fault")}`));
  return found;
}

export function mark(run) {
  return el("span", { class: `mark ${run.state}` }, run.state);
}

function fits(group, run, word) {
  const at = word.indexOf("=");
  if (at > 0) {
    const name = word.slice(0, at);
    const value = word.slice(at + 1);
    const columns = { env: group.env, algo: group.algo, run: run.name, seed: run.seed, state: run.state };
    const found = { ...columns, ...group.settings };
    const key = Object.keys(found).find((one) => one.toLowerCase() === name || `algo.${one}`.toLowerCase() === name);
    return key !== undefined && String(found[key]).toLowerCase() === value;
  }
  return [run.name, group.name, group.env, group.algo].join(" ").toLowerCase().includes(word);
}
