// All settings at once: an axis for the method, for each option that varies and for each measurement; a cell is a line
// through its values. Dragging along an axis selects a range of it.
const MISSING = -0.07; // where a line passes an axis on which its cell has no value
let parts = new Map(); // name of an axis -> the selected range, 0 at the bottom of the axis and 1 at its top

function axes(cells) {
  const plain = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));
  const optionNames = [...new Set(cells.flatMap((cell) => Object.keys(cell.options)))];
  const found = [
    { name: "method", value: (cell) => cell.method, text: plain },
    ...optionNames.map((name) => ({ name, value: (cell) => cell.options[name] ?? null, text: plain })),
    { name: "kept", value: (cell) => cell.realised ?? cell.ratio, text: (share) => percent(share), log: true },
    { name: "KV cache", value: (cell) => cell.kv_bytes, text: bytes, log: true },
    { name: "per token", value: (cell) => cell.tpot_s, text: milliseconds },
    { name: group.metric, value: (cell) => cell.score, text: (score) => (group.scale * score).toFixed(1) },
  ];
  return found.map((axis) => placed(axis, cells)).filter((axis) => axis.marks.length);
}

// The axis with `place`, which maps a value to 0 to 1, and `marks`, the values written beside it.
function placed(axis, cells) {
  const values = [...new Set(cells.map(axis.value).filter((value) => value !== null))];
  if (!values.every((value) => typeof value === "number")) {
    const last = Math.max(values.length - 1, 1);
    return { ...axis, marks: values, place: (value) => (value === null ? MISSING : 1 - values.indexOf(value) / last) };
  }
  const bend = axis.log ? Math.log : (value) => value;
  const [least, most] = [Math.min(...values), Math.max(...values)], [low, high] = [bend(least), bend(most)];
  const place = (value) => (value === null ? MISSING : high > low ? (bend(value) - low) / (high - low) : 0.5);
  const marks = values.length <= 6 ? values.sort((a, b) => b - a) : [most, least, ...ticks(least, most, axis.log, axis.text === bytes)];
  const apart = []; // names that would overlap are left out
  for (const mark of marks) if (apart.every((other) => Math.abs(place(mark) - place(other)) > 0.05)) apart.push(mark);
  return { ...axis, place, marks: apart };
}

function drawParallel() {
  const where = $("plot-all"), cells = group.cells.filter((cell) => !hidden.has(cell.series) && cell.score !== null);
  where.replaceChildren();
  if (!cells.length) return;
  const all = axes(cells);
  where.style.height = Math.max(340, 15 * new Set(cells.map((cell) => cell.method)).size + 70) + "px"; // a line for each name
  const width = Math.max(where.parentElement.clientWidth, 110 * all.length), height = where.clientHeight;
  const left = 20 + 7.5 * Math.max(...cells.map((cell) => cell.method.length)), right = 52, top = 34, bottom = 34;
  where.style.width = width + "px";
  const along = (number) => left + ((width - left - right) * number) / (all.length - 1);
  const up = (place) => height - bottom - (height - bottom - top) * place;
  const isChosen = (cell) => all.every(({ name, value, place }) => {
    const part = parts.get(name);
    return !part || (place(value(cell)) >= part[0] && place(value(cell)) <= part[1]);
  });
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "all settings and measurements of each cell" });
  const scores = cells.map((cell) => rightness(cell.score)), best = Math.max(...scores), worst = Math.min(...scores);
  for (const cell of [...cells].sort((a, b) => rightness(a.score) - rightness(b.score))) {
    const share = best > worst ? (rightness(cell.score) - worst) / (best - worst) : 1, chosen = isChosen(cell);
    const stroke = `color-mix(in oklch, #0072b2 ${(100 * share).toFixed(0)}%, #e69f00)`;
    const points = all.map(({ value, place }, number) => `${along(number)},${up(place(value(cell)))}`).join(" ");
    const line = svg("polyline", { class: chosen ? "cell" : "cell unchosen", points, fill: "none", stroke: chosen ? stroke : ink("--line"), "stroke-width": cells.length > 40 ? 1.1 : 1.8, opacity: chosen && cells.length > 40 && !parts.size ? 0.55 : 1 });
    hint(line, all.map(({ name, value, text }) => `${name} ${value(cell) === null ? "-" : text(value(cell))}`).join("\n"));
    chosen ? drawing.append(line) : drawing.prepend(line);
  }
  all.forEach((axis, number) => drawAxis(drawing, axis, along(number), up, number === 0, number === all.length - 1));
  where.append(drawing);
}

function drawAxis(drawing, { name, text, marks, place }, x, up, isFirst, isLast) {
  const drop = isFirst || isLast ? 4 : -4; // between two axes, a mark is above the lines that leave its place
  drawing.append(svg("line", { x1: x, x2: x, y1: up(0), y2: up(1), stroke: ink("--faint") }));
  drawing.append(svg("text", { x: isLast ? x + 50 : x, y: up(1) - 16, "text-anchor": isFirst || isLast ? "end" : "middle", "font-weight": 600 }, name));
  for (const mark of marks) {
    const y = up(place(mark));
    drawing.append(svg("line", { x1: x - 3, x2: x + 3, y1: y, y2: y, stroke: ink("--faint") }));
    drawing.append(svg("text", { class: "mark", x: x + (isFirst ? -8 : 7), y: y + drop, "text-anchor": isFirst ? "end" : "start" }, text(mark)));
  }
  const part = parts.get(name);
  if (part) drawing.append(svg("rect", { class: "part", x: x - 6, width: 12, y: up(part[1]), height: up(part[0]) - up(part[1]), fill: ink("--accent"), opacity: 0.3 }));
  const handle = svg("rect", { class: "axis", "data-axis": name, x: x - 12, width: 24, y: up(1) - 6, height: up(MISSING) - up(1) + 12, fill: "transparent", style: "cursor:ns-resize;touch-action:none" });
  const at = (event) => (up(0) - (event.clientY - drawing.getBoundingClientRect().top)) / (up(0) - up(1));
  handle.addEventListener("pointerdown", (event) => {
    const start = at(event);
    const end = (last) => {
      const ends = [start, at(last)].sort((a, b) => a - b);
      ends[1] - ends[0] > 0.01 ? parts.set(name, ends) : parts.delete(name); // a click clears the selection
      drawParallel();
    };
    addEventListener("pointerup", end, { once: true });
  });
  drawing.append(handle);
}

furtherPlots.push(drawParallel);
