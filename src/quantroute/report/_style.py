"""The page's style sheet and its only script. Nothing is fetched from anywhere else."""

from __future__ import annotations

from typing import Final

__all__ = ["LIVE_SCRIPT", "STYLE"]

# Colours: after Okabe and Ito's set, which people with any colour vision can tell apart; text on
# its ground has a contrast of at least 4.5 in both schemes.
STYLE: Final = """
:root { color-scheme: light dark;
  --ground: #f5f6f8; --card: #fff; --ink: #1b2330; --soft: #556070; --line: #dfe3e8;
  --rail: #edf0f3; --c1: #0067a8; --c2: #e08a00; --c3: #c2477f; --c4: #7a5195; --c5: #4fa3d8;
  --c6: #8a8f98; --good: #00875f; --bad: #c23b22; --goal: #1b2330; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #12161c; --card: #1b212a; --ink: #e8ecf1; --soft: #a3aebd; --line: #333c49;
  --rail: #2a323d; --c1: #56a8e8; --c2: #f0a63a; --c3: #e07fae; --c4: #b493d3; --c5: #8cc8ef;
  --c6: #8d96a3; --good: #2fb98c; --bad: #f0785f; --goal: #fff; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 12px; }
h4 { font-size: .9rem; margin: 16px 0 6px; }
header p { margin: 4px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.badge { display: inline-block; vertical-align: middle; font-size: .8rem; font-weight: 600;
  padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; white-space: nowrap; }
.badge.live, .badge.ok, .yes { color: var(--good); } .badge.warn, .no { color: var(--bad); }
.badge.plain { color: var(--soft); }
.yes, .no { font-weight: 600; display: inline-block; min-width: 2em; }
td ul { margin: 0; padding-left: 1.1em; } td ul:has(li:only-child) { list-style: none; padding: 0; }
.keep { white-space: nowrap; }
.tiles { display: grid; gap: 12px; margin: 20px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 165px), 1fr)); }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; min-width: 0; }
.tile .name { color: var(--soft); font-size: .82rem; }
.tile .value { font-size: 1.45rem; font-weight: 650; line-height: 1.3;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile .more { color: var(--soft); font-size: .82rem; line-height: 1.35; margin-top: 2px; }
.meter { height: 5px; border-radius: 3px; background: var(--rail); margin: 4px 0; }
.meter span { display: block; height: 100%; border-radius: 3px; background: var(--c1); }
.grid { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.card { padding: 16px; min-width: 0; break-inside: avoid; }
.card.wide { grid-column: 1 / -1; }
.note { color: var(--soft); font-size: .86rem; margin: 10px 0 0; }
.alarm { border-left: 3px solid var(--bad); padding-left: 10px; margin: 10px 0 0; }
.absent { color: var(--soft); font-size: .86rem; padding-left: 1.1em; margin: 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0;
  margin: 10px 0 0; font-size: .86rem; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 6px; }
.legend i.cap { height: 0; border-top: 2px dashed var(--bad); border-radius: 0;
  vertical-align: middle; width: 16px; }
svg { display: block; width: 100%; max-width: 640px; height: auto; margin: 0 auto;
  overflow: visible; }
svg text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.label { fill: var(--ink); }
.grid line.grid, line.grid { stroke: var(--line); stroke-width: 1; }
line.cut { stroke: var(--soft); stroke-dasharray: 2 4; }
line.goal { stroke: var(--goal); stroke-width: 2.5; }
line.whisker { stroke: var(--c1); stroke-width: 2; }
rect.rail { fill: var(--rail); }
path.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
path.line.cap { stroke: var(--bad); stroke-dasharray: 7 5; }
.soft { opacity: .55; }
rect.c1, path.area.c1, circle.c1 { fill: var(--c1); } path.line.c1 { stroke: var(--c1); }
rect.c2, path.area.c2, circle.c2 { fill: var(--c2); } path.line.c2 { stroke: var(--c2); }
rect.c3 { fill: var(--c3); } path.line.c3 { stroke: var(--c3); }
rect.c4 { fill: var(--c4); } path.line.c4 { stroke: var(--c4); }
rect.c5 { fill: var(--c5); } rect.c6 { fill: var(--c6); }
rect.good { fill: var(--good); } rect.bad { fill: var(--bad); }
i.c1 { background: var(--c1); } i.c2 { background: var(--c2); } i.c3 { background: var(--c3); }
i.c4 { background: var(--c4); } i.c5 { background: var(--c5); } i.c6 { background: var(--c6); }
i.good { background: var(--good); } i.bad { background: var(--bad); }
.scroll { overflow-x: auto; margin-top: 12px; }
.tall { max-height: 340px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
td:last-child { overflow-wrap: anywhere; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.num + :not(.num) { padding-left: 8px; }
tr.dim td:not(:last-child) { color: var(--soft); }
details { margin-top: 12px; font-size: .9rem; }
summary { cursor: pointer; color: var(--c1); }
dl { display: grid; grid-template-columns: minmax(8em, auto) 1fr; gap: 4px 14px; margin: 8px 0 0;
  font-size: .86rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .82rem; margin-top: 28px; }
#lost { display: none; position: sticky; top: 0; padding: 8px 16px; background: var(--bad);
  color: #fff; text-align: center; } #lost.shown { display: block; }
@media (max-width: 640px) {
  svg text { font-size: 15.5px; }
  table.wordy thead { display: none; }
  table.wordy, table.wordy tbody, table.wordy tr, table.wordy td { display: block; }
  table.wordy tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  table.wordy td { border: 0; padding: 1px 0; text-align: left; white-space: normal;
    display: grid; grid-template-columns: 6.5em 1fr; gap: 8px; }
  table.wordy td::before { content: attr(data-label); color: var(--soft); }
  table.wordy .num + :not(.num) { padding-left: 0; }
  table.wordy td:first-child { display: block; }
  table.wordy td:first-child::before { content: none; }
  .keep { white-space: normal; font-weight: 600; }
}
@media print {
  :root { color-scheme: light; } body { background: #fff; font-size: 11pt; }
  main { max-width: none; padding: 0; } .tile, .card { border-color: #bbb; }
  .tall { max-height: none; } .scroll { overflow: visible; }
  rect, path, i, .meter, .meter span { -webkit-print-color-adjust: exact;
    print-color-adjust: exact; }
}
"""

# Replaces what is shown by what the server says now; opened details and the place stay as they are.
LIVE_SCRIPT: Final = """
(function () {
  "use strict";
  var shown = document.getElementById("report"), lost = document.getElementById("lost");
  var version = shown.dataset.version;
  function opened() {
    return Array.prototype.map.call(shown.querySelectorAll("details"), function (d) {
      return d.open; });
  }
  function take(found) {
    lost.classList.remove("shown");
    if (found.version !== version) {
      var before = opened();
      version = found.version;
      shown.innerHTML = found.html;
      shown.querySelectorAll("details").forEach(function (d, i) { d.open = !!before[i]; });
    }
    setTimeout(ask, found.again_ms);
  }
  function ask() {
    fetch("data.json", { cache: "no-store" })
      .then(function (answer) {
        if (!answer.ok) { throw new Error(answer.status); }
        return answer.json();
      })
      .then(take)
      .catch(function () { lost.classList.add("shown"); setTimeout(ask, 5000); });
  }
  setTimeout(ask, 1000);
})();
"""
