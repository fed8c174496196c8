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
