// Works the page as a person would, and leaves what it saw in <pre id=report>.
"use strict";
addEventListener("error", e => report.errors.push(e.message));
const report = {errors: []};
const box = canvas.getBoundingClientRect();
const point = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
const text = () => $("explain").innerText;
const shownPixels = () => { const row = pen.getImageData(0, TOP + 12, canvas.width, 1).data; const seen = new Set(); for (let i = 0; i < row.length; i += 4) seen.add(row.slice(i, i + 3).join()); return seen.size; };
const inside = t => x(t);
report.colours = shownPixels();
// Pixels of the colour of measured memory, below the lane of rank 0.
const below = pen.getImageData(0, TOP + LANE, canvas.width, MEMORY).data, line = color("found").match(/\w\w/g).map(part => parseInt(part, 16));
report.lines = 0;
for (let i = 0; i < below.length; i += 4) report.lines += line.every((part, n) => Math.abs(below[i + n] - part) < 8);
report.keys = $("keys").innerText;
report.view = [from, to];
point("pointermove", inside(0.5), TOP + 5);
report.block = text();
point("pointermove", inside(3), TOP + 5);
report.idle = text();
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, clientX: box.left + inside(6), clientY: box.top + 50, bubbles: true, cancelable: true}));
report.zoomed = [from, to];
point("pointerdown", 500, 40);
point("pointermove", 400, 40);
point("pointerup", 400, 40);
report.panned = [from, to];
canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "0", bubbles: true}));
report.whole = [from, to];
point("pointerdown", inside(23.5), TOP + 5);
point("pointerup", inside(23.5), TOP + 5);
report.chain = [...chain].map(span => name({span}));
report.clicked = text();
const tall = canvas.clientHeight; $("memory").click();
report.shorter = canvas.clientHeight < tall;
report.map = $("map").innerText;
report.pairs = data.spans.flatMap((row, rank) => row.map((span, index) => lines({span, rank, index})))
  .filter(said => /F/.test(said[0][0])).flatMap(said => said.filter(line => line[1].startsWith("paired with")).map(line => `${said[0][0]} ${line[1].split(":")[0]}`)).sort();
report.fetched = performance.getEntriesByType("resource").length;
const out = document.createElement("pre"); out.id = "report"; out.textContent = JSON.stringify(report); document.body.append(out);
