// Line charts: show the values at the pointer, and show or hide runs.
const hiddenRuns = new Set();

for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg");
  const hover = svg.querySelector(".hover");
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const [left, top, right, bottom] = chart.plot;
  const [xLow, xHigh, yLow, yHigh] = chart.range;
  const toX = (x) => left + ((x - xLow) / (xHigh - xLow)) * (right - left);
  const toY = (y) => bottom - ((y - yLow) / (yHigh - yLow)) * (bottom - top);
  const visibleLines = () => chart.lines.filter((line) => line.x.length && !hiddenRuns.has(line.run));
  const nearest = (values, x) =>
    values.reduce((best, value, index) => (Math.abs(value - x) < Math.abs(values[best] - x) ? index : best), 0);
  let currentX = null;

  const draw = (name, attributes) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    hover.append(shape);
  };
  const leave = () => {
    currentX = null;
    hover.replaceChildren();
    hideTip();
  };
  const show = (x, clientX, clientY) => {
    const shown = visibleLines();
    if (!shown.length) return leave();
    hover.replaceChildren();
    // Snap to the point that is nearest on any line; the other lines show their points nearest to it.
    const nearestLine = shown.reduce((a, b) => {
      const [p, q] = [a.x[nearest(a.x, x)], b.x[nearest(b.x, x)]];
      return Math.abs(q - x) < Math.abs(p - x) ? b : a;
    });
    currentX = nearestLine.x[nearest(nearestLine.x, x)];
    draw("line", { x1: toX(currentX), x2: toX(currentX), y1: top, y2: bottom });
    const texts = [{ text: `${chart.x} ${Number(currentX.toPrecision(4))}` }];
    for (const line of shown) {
      const index = nearest(line.x, currentX);
      draw("circle", { cx: toX(line.x[index]), cy: toY(line.y[index]), r: 4, class: `c${line.colour}` });
      const note = line.notes[index] ? `, ${line.notes[index]}` : "";
      const value = Number(line.y[index].toPrecision(chart.digits));
      texts.push({ text: `${line.name}: ${value}${note}`, colour: line.colour });
    }
    showTip(texts, clientX, clientY);
  };
  const onPointer = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    show(xLow + ((inside - left) / (right - left)) * (xHigh - xLow), event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", onPointer);
  svg.addEventListener("pointerdown", onPointer);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step || !visibleLines().length) return;
    event.preventDefault();
    const values = [...new Set(visibleLines().flatMap((line) => line.x))].sort((a, b) => a - b);
    const index = currentX === null ? (step > 0 ? 0 : values.length - 1) : values.indexOf(currentX) + step;
    const x = values[Math.max(0, Math.min(values.length - 1, index))];
    const box = svg.getBoundingClientRect();
    show(x, box.left + (toX(x) / svg.viewBox.baseVal.width) * box.width, box.top + 20);
  });
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    if (!hiddenRuns.delete(run)) hiddenRuns.add(run);
    button.setAttribute("aria-pressed", String(!hiddenRuns.has(run)));
    for (const series of document.querySelectorAll(`.chart [data-run="${run}"]`)) series.toggleAttribute("hidden", hiddenRuns.has(run));
  });
}
