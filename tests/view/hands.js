// What a person does on the page, one thing after the other; what is seen then stands in the body's data.

const said = [];
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => all(selector).map((node) => node.textContent);
const labels = () => text(".legend .label");
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const button = (name) => all("button").find((node) => node.textContent === name);

async function act(name, does, sees) {
  does();
  await pause(400);
  said.push([name, sees()]);
}

function type(words) {
  const filter = document.getElementById("filter");
  filter.value = words;
  filter.dispatchEvent(new Event("input"));
}

function choose(select, value) {
  select.value = value;
  select.dispatchEvent(new Event("change"));
}

while (!document.body.dataset.ready) await pause(50);
await act("begin", () => {}, labels);
await act("filter a setting", () => type("algo.lr=0.01"), labels);
await act("filter a seed", () => type("seed=1 ppo"), labels);
await act("filter nothing", () => type("nothing"), () => [...labels(), ...text("#count span")]);
await act("no filter", () => type(""), labels);
await act("hide one", () => { all(".toggle")[0].focus(); all(".toggle")[0].click(); }, () => [...labels(), document.activeElement.getAttribute("aria-label")]);
await act("none", () => button("none").click(), () => [...labels(), ...text(".charts p")]);
await act("all", () => button("all").click(), labels);
await act("open", () => all(".more")[0].click(), () => text(".group li a"));
await act("wall time", () => button("Wall time").click(), () => text("button[aria-pressed=true]").filter(Boolean));
await act("another chart", () => choose(document.querySelector("select.add"), "eval/mean_reward"), () => text(".charts h3"));
await act("one chart less", () => choose(all(".tools select")[0], ""), () => text(".charts h3"));
await act("cursor", () => {
  const over = document.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + 9, bubbles: true };
  over.dispatchEvent(new MouseEvent("mouseenter", at));
  over.dispatchEvent(new MouseEvent("mousemove", at));
}, () => [...text(".legend .value"), ...text(".chart .at")]);
await act("table", () => button("Table").click(), () => text("tbody tr td:first-child"));
await act("sorted", () => all("th button").find((node) => node.textContent === "return").click(), () => text("tbody tr td:first-child"));
await act("a run", () => document.querySelector(".group li a").click(), () => text("h1"));
await act("more metrics", () => document.querySelector("details summary").click(), () => [all("details .chart").length > 0]);
await act("back", () => document.querySelector("main a").click(), () => text(".charts h3"));
document.body.dataset.said = JSON.stringify(said);
