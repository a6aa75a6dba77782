"""The looks of the HTML report: one style sheet, for light and dark screens and for paper."""

CSS = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f5f7fa; --edge: #d5dde7; --text: #1b2430;
  --muted: #56657a; --accent: #2f6fde; --bar: #5b8ff9; --rest: #c6ced8; --warn: #8a4b00;
    --warnground: #fff4e0; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ground: #0c1117; --panel: #151c25; --edge: #2d3745; --text: #e8edf4; --muted: #9dabbd;
    --accent: #7ea9ff; --bar: #5b8ff9; --rest: #556172; --warn: #ffc46b; --warnground: #2c2210; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 1000px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 36px; }
h1 { font-size: 32px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 21px; margin: 44px 0 12px; }
h3 { font-size: 16px; margin: 24px 0 6px; }
p { margin: 6px 0; }
.muted, caption, footer { color: var(--muted); }
.name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 13px;
  overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin: 22px 0 0; padding: 0; }
.numbers div { background: var(--panel); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 16px; }
.numbers dt { color: var(--muted); font-size: 13px; }
.numbers dd { margin: 0; font-size: 24px; font-weight: 650; overflow-wrap: anywhere; }
.numbers dd small { display: block; font-size: 13px; font-weight: 400; color: var(--muted); }
.scroll { overflow-x: auto; border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 12px; vertical-align: top; border-top: 1px solid var(--edge); }
thead th { border-top: 0; color: var(--muted); font-weight: 600; font-size: 13px;
  background: var(--panel); }
tbody th { font-weight: 400; }
tr.kind > * { background: var(--panel); font-weight: 600; }
tr.tensor th { padding-left: 30px; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.sum, th.sum { font-weight: 650; }
.tag { display: inline-block; border: 1px solid var(--edge); border-radius: 6px; padding: 0 7px;
  font-size: 12px;
  font-weight: 500; background: var(--ground); white-space: nowrap; }
figure { margin: 0; }
.picture { overflow-x: auto; }
.picture svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.bars tbody th { white-space: nowrap; }
.bars td:nth-child(2) { width: 100%; }
.bars svg { display: block; width: 100%; height: 12px; min-width: 120px; margin-top: 5px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0; padding: 0; list-style: none;
  font-size: 13px; }
.legend svg { width: 12px; height: 12px; vertical-align: -1px; margin-right: 6px; }
.c0 { fill: #5b8ff9; } .c1 { fill: #61d9a5; } .c2 { fill: #f6bd16; } .c3 { fill: #f0785a; }
.c4 { fill: #6fcbe8; }
.c5 { fill: #a284d8; } .c6 { fill: #ff9f4a; } .whole { fill: var(--rest); }
ul.notes { margin: 0; padding: 0; list-style: none; }
ul.notes li { border-left: 3px solid var(--accent); background: var(--panel); padding: 8px 14px;
  margin: 8px 0;
  border-radius: 0 8px 8px 0; overflow-wrap: anywhere; }
ul.notes li.warning { border-color: var(--warn); background: var(--warnground); color: var(--warn); }
nav { margin-top: 18px; font-size: 14px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: var(--accent); }
a:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 2px; }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; }
footer { padding: 40px 24px 48px; font-size: 13px; }
@media screen and (max-width: 640px) {
  main, header, footer { padding-left: 14px; padding-right: 14px; }
  h1 { font-size: 25px; }
  .numbers { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .numbers div { padding: 8px 10px; }
  .numbers dd { font-size: 20px; }
  th, td { padding: 6px 8px; }
  .scroll table { min-width: 620px; }
  .picture svg { min-width: 620px; }
}
@media print {
  body { font-size: 11pt; }
  main, header, footer { max-width: none; padding: 0; }
  nav { display: none; }
  h2, h3 { break-after: avoid; }
  tr, .numbers div, li { break-inside: avoid; }
  .scroll { overflow: visible; border-radius: 0; }
  .scroll table { font-size: 9pt; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
