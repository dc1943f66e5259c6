// Elements, numbers as text, colours, and requests. Text of runs enters the page as text nodes alone.

export const COLOURS = 7; // told apart by all common kinds of colour vision; then lines differ
const DASHES = [[], [9, 5], [2, 4], [12, 4, 2, 4]];

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Draws anew, and gives the keyboard back to the element of the same label.
export function redraw(draw) {
  const label = (node) => node.getAttribute("aria-label") || node.textContent;
  const before = document.activeElement;
  const kept = before && before !== document.body && before.id !== "filter" ? [before.tagName, label(before)] : null;
  draw();
  if (!kept || document.activeElement !== document.body) return;
  [...document.querySelectorAll(kept[0])].find((node) => label(node) === kept[1])?.focus({ preventScroll: true });
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function look(slot) {
  return { colour: css(`--c${slot % COLOURS}`), dash: DASHES[Math.floor(slot / COLOURS) % DASHES.length] };
}

// A piece of a curve's line; an empty box where the curve is not shown.
export function swatch(slot) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  for (const [name, value] of Object.entries({ width: 28, height: 12, viewBox: "0 0 28 12", "aria-hidden": "true" })) svg.setAttribute(name, value);
  const shape = document.createElementNS(space, slot === null ? "rect" : "line");
  const { colour, dash } = slot === null ? { colour: css("--soft"), dash: [] } : look(slot);
  const box = { x: 8.5, y: 0.5, width: 11, height: 11, rx: 2.5, "stroke-width": 1 };
  const line = { x1: 1, x2: 27, y1: 6, y2: 6, "stroke-width": 3, "stroke-dasharray": dash.map((x) => x * 0.8).join(" ") };
  for (const [name, value] of Object.entries({ fill: "none", stroke: colour, ...(slot === null ? box : line) })) shape.setAttribute(name, value);
  svg.append(shape);
  return svg;
}

export function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
}

export function steps(value) {
  for (const [size, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(4)}${letter}`;
  }
  return `${+value.toPrecision(6)}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  return `${+(seconds / 3600).toPrecision(3)} h`;
}

export async function get(path, query = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw Object.assign(new Error((await answer.text()).trim()), { refused: true });
  return answer.json();
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
