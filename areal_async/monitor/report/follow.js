// At the end of a watched page: it asks the file again and again, and replaces what has changed, and nothing else.
// Where the reader is, what is open, pointed at or selected, stays; a sample that is open stays until it is closed.
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
