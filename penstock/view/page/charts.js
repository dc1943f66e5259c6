// Charts by uPlot: lines, bands of seeds, points of evaluations; a legend of their own below, with values at the cursor.

import { css, duration, el, look, shown, steps, swatch } from "./elements.js";

const watched = new Map();
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const plot = watched.get(target);
    if (plot && contentRect.width > 0 && Math.round(contentRect.width) !== plot.width) plot.setSize({ width: Math.round(contentRect.width), height: plot.height });
  }
});

export function forget(node) {
  for (const [place, plot] of watched) {
    if (node.contains(place)) {
      resized.unobserve(place);
      plot.destroy();
      watched.delete(place);
    }
  }
}

// Pairs in the order of x, each x once.
function table(x, ...columns) {
  const order = [...x.keys()].sort((a, b) => x[a] - x[b]).filter((at, i, all) => i + 1 === all.length || x[at] !== x[all[i + 1]]);
  return [x, ...columns].map((column) => order.map((at) => column[at]));
}

function nearest(x, at) {
  let low = 0;
  let high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - x[low - 1] < x[low] - at ? low - 1 : low;
}

function translucent(colour, alpha) {
  return `${colour}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

// curves: {name, slot, x, y, low?, high?, points?, data?}
export function chart(place, title, curves, { wall = false, height = 320, legend = true, zoom = null } = {}) {
  const at = el("span", { class: "at" });
  const canvas = el("div");
  const values = curves.map(() => el("span", { class: "value" }));
  place.append(el("div", { class: "chart" }, el("div", { class: "title" }, el("h3", {}, title), at), canvas,
    legend ? el("ul", { class: "legend" }, ...curves.map((c, i) => el("li", {}, swatch(c.slot), el("span", { class: "label" }, c.name), values[i]))) : null));

  const tables = [];
  const series = [{}];
  const bands = [];
  const line = { points: { show: false }, spanGaps: true };
  curves.forEach((curve) => {
    const { colour, dash } = look(curve.slot);
    if (curve.low) {
      const [x, high, low] = table(curve.x, curve.high, curve.low);
      tables.push([x, high, low]);
      bands.push({ series: [series.length, series.length + 1], fill: translucent(colour, 0.2) });
      series.push({ ...line, width: 0, stroke: "transparent" }, { ...line, width: 0, stroke: "transparent" });
    }
    if (curve.data) {
      tables.push(table(...curve.data));
      series.push({ ...line, stroke: colour, width: 1, dash: [1, 3] });
    }
    const own = table(curve.x, curve.y);
    tables.push(own);
    series.push({ ...line, stroke: colour, width: 2, dash, points: { show: own[0].length === 1, size: 6, fill: colour } });
    if (curve.points && curve.points[0].length) {
      tables.push(table(...curve.points));
      series.push({ spanGaps: true, stroke: colour, width: 2, paths: () => null, points: { show: true, size: 8, width: 2, stroke: colour, fill: css("--back") } });
    }
  });
  const drawn = tables.length ? uPlot.join(tables) : [[]];
  const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
  const one = (x) => (wall ? duration(x) : steps(x));
  const plot = new uPlot({
    width: Math.max(200, Math.round(place.clientWidth && canvas.clientWidth ? canvas.clientWidth : 300)),
    height,
    legend: { show: false },
    cursor: { y: false, points: { show: false } },
    scales: { x: { time: false }, y: { range: (u, low, high) => padded(low, high) } },
    axes: [
      { ...axis, size: 30, space: 70, values: (u, splits) => splits.map(one) },
      { ...axis, size: (u, labels) => Math.max(34, 14 + 7 * Math.max(0, ...(labels || []).map((text) => text.length))), values: (u, splits) => splits.map(steps) },
    ],
    series,
    bands,
    hooks: {
      setCursor: [(u) => {
        const x = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null;
        at.textContent = x === null ? "" : one(x);
        curves.forEach((curve, i) => {
          const inside = x !== null && curve.x.length && x >= curve.x[0] && x <= curve.x[curve.x.length - 1];
          values[i].textContent = inside ? shown(curve.y[nearest(curve.x, x)]) : "";
          if (!legend && inside) at.textContent += `: ${shown(curve.y[nearest(curve.x, x)])}`;
        });
      }],
    },
  }, drawn, canvas);
  if (zoom) plot.setScale("x", zoom);
  watched.set(canvas, plot);
  resized.observe(canvas);
  return plot;
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  return [low - room, high + room];
}

// What a person has zoomed to, or null.
export function zoomOf(plot) {
  const { min, max } = plot.scales.x;
  const x = plot.data[0];
  return x.length && (min > x[0] || max < x[x.length - 1]) ? { min, max } : null;
}
