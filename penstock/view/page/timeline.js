// The timeline of a run's processes, from its trace: drag to look closer, double-click for the whole.

import { css, el, shown } from "./elements.js";

const COLOURS = { step: "--c0", act: "--c4", serve: "--c1", send: "--c3", sample: "--c5", learn: "--c2", wait: "--line" };
const TEXTS = { step: "step: environments", act: "act: forward, own agent", serve: "serve: forward for workers", send: "send: waking workers", sample: "sample: a runner's fragment" };
const ROW = 24;
const LEFT = 130;
const FOOT = 26;

export function timeline(trace) {
  const rows = trace.rows;
  let end = 1;
  for (const { spans } of rows) for (let i = 0; i < spans.length; i += 3) end = Math.max(end, spans[i] + spans[i + 1]);
  let view = [0, end];
  let drag = null;
  const canvas = el("canvas", { role: "img", "aria-label": "Timeline of processes" });
  const colours = trace.kinds.map((kind, i) => css(COLOURS[kind] || `--c${i % 7}`));

  function draw() {
    const width = canvas.clientWidth;
    if (!width) return;
    const height = rows.length * ROW + FOOT;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const left = Math.min(LEFT, width * 0.3);
    const at = (us) => left + ((us - view[0]) / (view[1] - view[0])) * (width - left - 4);
    rows.forEach(({ title, spans }, row) => {
      const top = row * ROW;
      pen.fillStyle = css("--soft");
      pen.fillText(cut(pen, title, left - 10), 0, top + ROW / 2 + 4);
      for (let i = 0; i < spans.length; i += 3) {
        const start = Math.max(at(spans[i]), left);
        const stop = Math.min(at(spans[i] + spans[i + 1]), width - 4);
        if (stop < left || start > width - 4) continue;
        pen.fillStyle = colours[spans[i + 2]];
        pen.fillRect(start, top + 3, Math.max(stop - start, 0.6), ROW - 6);
      }
    });
    pen.fillStyle = css("--soft");
    const bottom = rows.length * ROW + 16;
    const [from, to] = view.map((us) => us / 1000);
    const count = width > 600 ? 5 : 2;
    for (let i = 0; i <= count; i += 1) {
      const ms = from + ((to - from) * i) / count;
      pen.textAlign = i === 0 ? "left" : i === count ? "right" : "center";
      pen.fillText(`${shown(ms)} ms`, at(ms * 1000), bottom);
    }
    pen.textAlign = "left";
    if (drag) {
      pen.globalAlpha = 0.2;
      pen.fillStyle = css("--accent");
      pen.fillRect(Math.min(drag[0], drag[1]), 0, Math.abs(drag[1] - drag[0]), rows.length * ROW);
      pen.globalAlpha = 1;
    }
  }

  const place = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => {
    drag = [place(event), place(event)];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      drag[1] = place(event);
      draw();
    }
  });
  canvas.addEventListener("pointerup", () => {
    const left = Math.min(LEFT, canvas.clientWidth * 0.3);
    const back = (x) => view[0] + ((Math.max(x, left) - left) / (canvas.clientWidth - left - 4)) * (view[1] - view[0]);
    if (drag && Math.abs(drag[1] - drag[0]) > 6) {
      const ends = [back(Math.min(...drag)), back(Math.max(...drag))];
      if (ends[1] - ends[0] > 1) view = ends;
    }
    drag = null;
    draw();
  });
  canvas.addEventListener("dblclick", () => {
    view = [0, end];
    draw();
  });
  new ResizeObserver(draw).observe(canvas);
  const names = trace.kinds.map((kind, i) => el("li", {}, box(colours[i]), TEXTS[kind] || kind));
  return el("div", { class: "timeline" }, canvas, el("ul", { class: "legend" }, ...names),
    el("p", { class: "soft" }, "Drag to look closer; double-click for the whole."));
}

function box(colour) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const rect = document.createElementNS(space, "rect");
  for (const [name, value] of Object.entries({ width: 12, height: 12 })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ width: 12, height: 12, rx: 2, fill: colour })) rect.setAttribute(name, value);
  svg.append(rect);
  return svg;
}

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text;
  while (short && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}
