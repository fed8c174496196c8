"""The page's style and scripts, inside it: nothing is fetched from anywhere but, of a watched one, the page itself."""

LIGHT = {
    "page": "#f3f3f1",
    "card": "#fcfcfb",
    "ink": "#14140f",
    "soft": "#55554f",
    "faint": "#6d6d65",
    "line": "#e2e1dc",
    "c1": "#2a78d6",
    "c2": "#d2551f",
    "c3": "#14855c",
    "c4": "#7a4fc4",
    "c5": "#a87000",
    "tint": "210, 85, 31",
    "bad": "#b3261e",
}
"""Colours of the page by day, by name; of pictures always."""

STYLE = (
    ":root { color-scheme: light; "
    + "".join(f"--{name}: {colour}; " for name, colour in LIGHT.items())
    + """}
@media (prefers-color-scheme: dark) {
  :root {
    color-scheme: dark;
    --page: #111110; --card: #1b1b1a; --ink: #f3f2ee; --soft: #bdbcb4; --faint: #9b9a92; --line: #33332f;
    --c1: #5b9df0; --c2: #ef8354; --c3: #3fbf8f; --c4: #b096f0; --c5: #d9a53a; --tint: 239, 131, 84; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 10px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
p { margin: 4px 0; }
.about { color: var(--soft); display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; }
button { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 12px; cursor: pointer; }
button:hover { border-color: var(--faint); }
.tiles { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); margin-top: 16px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 600; line-height: 1.25; overflow-wrap: anywhere; }
.tile span, .note, .none { color: var(--soft); font-size: 13px; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.card { display: flex; flex-direction: column; }
.card.wide { display: block; }
.card header { display: flex; gap: 10px; justify-content: space-between; align-items: baseline; }
.card header .unit { color: var(--soft); font-weight: 400; }
.card header output { font-weight: 600; white-space: nowrap; }
.card .note { margin: 2px 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; margin: 4px 0; }
.key i { display: inline-block; width: 12px; height: 4px; border-radius: 2px; margin-right: 6px; vertical-align: 3px; }
.chart { display: block; width: 100%; height: auto; margin-top: auto; padding-top: 6px; overflow: visible;
  touch-action: pan-y; }
.chart:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; border-radius: 4px; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--faint); stroke-width: 1; }
.tick, .value { fill: var(--soft); font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums; }
.tick.end { text-anchor: end; }
.value { fill: var(--ink); }
.cross { stroke: var(--faint); stroke-dasharray: 3 3; visibility: hidden; }
[class^=l][d] { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); }
.l4 { stroke: var(--c4); } .l5 { stroke: var(--c5); }
.c1, .f1 { fill: var(--c1); } .c2, .f2 { fill: var(--c2); } .c3, .f3 { fill: var(--c3); }
.c4, .f4 { fill: var(--c4); } .c5, .f5 { fill: var(--c5); }
.k1 { background: var(--c1); } .k2 { background: var(--c2); } .k3 { background: var(--c3); }
.k4 { background: var(--c4); } .k5 { background: var(--c5); }
circle { stroke: var(--card); stroke-width: 1.5; }
#tip { position: absolute; z-index: 2; pointer-events: none; visibility: hidden; max-width: 280px; font-size: 13px;
  background: var(--card); border: 1px solid var(--faint); border-radius: 6px; padding: 6px 10px;
  box-shadow: 0 2px 10px rgba(0, 0, 0, .18); }
#tip div { display: flex; gap: 14px; justify-content: space-between; }
#tip b { font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 12px 4px 0; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
td:first-child, th:first-child { text-align: left; }
td.words { white-space: normal; text-align: left; min-width: 180px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin-bottom: 8px; }
summary { cursor: pointer; padding: 10px 14px; }
summary b { margin-right: 10px; }
summary span { color: var(--soft); font-size: 13px; margin-right: 10px; display: inline-block; }
details > :not(summary) { margin: 0 14px 12px; }
pre { overflow-x: auto; font-size: 12.5px; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, monospace; }
.tokens .g { color: var(--faint); }
.tokens .m { color: var(--faint); text-decoration: line-through; }
.tokens .t { border-bottom: 2px solid var(--c1); border-radius: 2px 2px 0 0; }
.p1 { background: rgba(var(--tint), .14); } .p2 { background: rgba(var(--tint), .3); }
.p3 { background: rgba(var(--tint), .5); } .p4 { background: rgba(var(--tint), .75); font-weight: 700; }
.v { color: var(--c4); font-size: 11px; border: 1px solid var(--c4); border-radius: 4px; padding: 0 3px;
  margin: 0 2px; }
.bad { color: var(--bad); }
"""
)

SCRIPT = """
const tip = document.getElementById("tip");
let pointed = null;
function show(svg, place) {
  pointed = svg;
  const chart = svg.chart, cross = svg.querySelector(".cross");
  svg.place = place;
  svg.querySelectorAll(".at").forEach(dot => dot.remove());
  cross.setAttribute("x1", chart.px[place]); cross.setAttribute("x2", chart.px[place]);
  cross.style.visibility = "visible";
  tip.textContent = "";
  const head = document.createElement("div");
  head.textContent = (chart.of || "step") + " " + chart.x[place];
  tip.append(head);
  chart.series.forEach((one, k) => {
    if (one.text[place] === null) return;
    const [row, name, value] = ["div", "span", "b"].map(tag => document.createElement(tag));
    name.className = "key";
    const key = document.createElement("i"); key.className = "k" + (k + 1);
    name.append(key, one.name); value.textContent = one.text[place] + " " + chart.unit;
    row.append(name, value); tip.append(row);
    if (one.py[place] !== null) {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("class", "at c" + (k + 1)); dot.setAttribute("r", 4);
      dot.setAttribute("cx", chart.px[place]); dot.setAttribute("cy", one.py[place]); svg.append(dot);
    }
  });
  const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  const x = box.left + chart.px[place] * scale + scrollX, room = document.documentElement.clientWidth + scrollX;
  const left = x + 14 + tip.offsetWidth < room ? x + 14 : Math.max(scrollX + 4, x - 14 - tip.offsetWidth);
  tip.style.left = left + "px"; tip.style.top = box.top + scrollY + 8 + "px"; tip.style.visibility = "visible";
}
function hide(svg) {
  svg.querySelectorAll(".at").forEach(dot => dot.remove());
  svg.querySelector(".cross").style.visibility = "hidden"; tip.style.visibility = "hidden";
}
function listen(svg) {
  svg.chart = JSON.parse(svg.dataset.chart);
  const xs = svg.chart.px;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let place = 0;
    xs.forEach((px, k) => { if (Math.abs(px - x) < Math.abs(xs[place] - x)) place = k; });
    show(svg, place);
  });
  svg.addEventListener("pointerleave", () => hide(svg));
  svg.addEventListener("blur", () => hide(svg));
  svg.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    const place = svg.place === undefined ? (by > 0 ? -1 : xs.length) : svg.place;
    show(svg, Math.min(xs.length - 1, Math.max(0, place + by)));
  });
}
const opened = "areal-open-" + document.title;
let open = [];
try { open = JSON.parse(sessionStorage.getItem(opened) || "[]"); } catch (error) { open = []; }
function keep(one) {
  if (open.includes(one.id)) one.open = true;
  one.addEventListener("toggle", () => {
    open = [...document.querySelectorAll("details[open][id]")].map(each => each.id);
    try { sessionStorage.setItem(opened, JSON.stringify(open)); } catch (error) { return; }
  });
}
function start() {
  document.querySelectorAll("svg.chart").forEach(listen);
  document.querySelectorAll("details[id]").forEach(keep);
}
"""

ANSWER = """
const since = new URLSearchParams(location.search).get("since"), isAsked = self !== top && since !== null;
function answer(html) {
  parent.postMessage({stamp: STAMP, html}, location.protocol === "file:" ? "*" : location.origin);
}
if (isAsked) {
  if (since === STAMP) { answer(null); stop(); }
  else addEventListener("DOMContentLoaded", () => answer(document.querySelector("main").innerHTML));
}
"""
"""In the head of a watched page, after ``STAMP``, which says when it was written, and ``LOOK_MS``: to a page that has
loaded this one into a hidden frame and tells what it shows itself, it gives what is new."""

FOLLOW = """
const told = new WeakMap(), isPlace = one => one.matches("section, .charts");
const name = (one, k) => one.id || one.dataset.name || one.tagName + k;
function remember(place) {
  for (const one of place.children) if (isPlace(one)) remember(one); else told.set(one, one.outerHTML);
}
function isSelected(one) {
  const selection = getSelection();
  return !selection.isCollapsed && (one.contains(selection.anchorNode) || one.contains(selection.focusNode));
}
function place(one, before) {
  const isPointed = before && tip.style.visibility === "visible" && before.contains(pointed);
  const isFocused = before && before.contains(document.activeElement), left = before ? before.scrollLeft : 0;
  told.set(one, one.outerHTML);
  one.querySelectorAll("svg.chart").forEach(listen);
  if (one.matches("details[id]")) keep(one);
  if (!before) return;
  before.replaceWith(one);
  one.scrollLeft = left;
  const svg = one.querySelector("svg.chart");
  if (!svg) return;
  if (isFocused) svg.focus({preventScroll: true});
  if (isPointed) {
    const at = svg.chart.x.indexOf(pointed.chart.x[pointed.place]);
    show(svg, at < 0 ? svg.chart.x.length - 1 : at);
  }
}
function merge(old, fresh) {
  const news = [...fresh.children].map((one, k) => [name(one, k), one]), names = new Set(news.map(one => one[0]));
  const before = new Map([...old.children].map((one, k) => [name(one, k), one]));
  const kept = new Set();
  for (const [key, one] of before) if (!names.has(key)) { if (one.open) kept.add(one); else one.remove(); }
  let next = old.firstElementChild;
  for (const [key, one] of news) {
    const was = before.get(key);
    while (kept.has(next)) next = next.nextElementSibling;
    if (was && was !== next) old.insertBefore(was, next);
    if (!was) { place(one); old.insertBefore(one, next); }
    else if (isPlace(was)) merge(was, one);
    else if (told.get(was) !== one.outerHTML && !isSelected(was)) place(one, was);
    next = (one.isConnected && one.parentElement === old ? one : was).nextElementSibling;
  }
}
let shown = STAMP, frame, timer;
function look() {
  if (frame) frame.remove();
  frame = document.createElement("iframe");
  frame.hidden = true;
  frame.src = "?since=" + encodeURIComponent(shown) + "&at=" + Date.now();
  document.body.append(frame);
  timer = setTimeout(look, 10 * LOOK_MS);
}
addEventListener("message", event => {
  if (!frame || event.source !== frame.contentWindow) return;
  clearTimeout(timer);
  timer = setTimeout(look, LOOK_MS);
  if (event.data.html === null) return;
  const fresh = document.createElement("template");
  fresh.innerHTML = "<main>" + event.data.html + "</main>";
  merge(document.querySelector("main"), fresh.content.firstElementChild);
  shown = event.data.stamp;
});
if (!isAsked) { remember(document.querySelector("main")); start(); timer = setTimeout(look, LOOK_MS); }
"""
"""At the end of a watched page: it asks the file again and again, and replaces what has changed, and nothing else.
Where the reader is, what is open, pointed at or selected, stays; a sample that is open stays until it is closed."""
