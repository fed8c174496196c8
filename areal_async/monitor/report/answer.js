// In the head of a watched page, after STAMP, which says when it was written, and LOOK_MS: to a page that has loaded
// this one into a hidden frame and tells what it shows itself, it gives what is new.
const since = new URLSearchParams(location.search).get("since"), isAsked = self !== top && since !== null;
function answer(html) {
  parent.postMessage({stamp: STAMP, html}, location.protocol === "file:" ? "*" : location.origin);
}
if (isAsked) {
  if (since === STAMP) { answer(null); stop(); }
  else addEventListener("DOMContentLoaded", () => answer(document.querySelector("main").innerHTML));
}
