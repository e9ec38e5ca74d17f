// Line charts: values at the pointer, and runs switched on and off.
const off = new Set();

for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg");
  const hover = svg.querySelector(".hover");
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const [left, top, right, bottom] = chart.plot;
  const [xLow, xHigh, yLow, yHigh] = chart.range;
  const across = (x) => left + ((x - xLow) / (xHigh - xLow)) * (right - left);
  const down = (y) => bottom - ((y - yLow) / (yHigh - yLow)) * (bottom - top);
  const lines = () => chart.lines.filter((line) => line.x.length && !off.has(line.run));
  const nearest = (values, x) =>
    values.reduce((best, value, number) => (Math.abs(value - x) < Math.abs(values[best] - x) ? number : best), 0);
  let at = null;

  const draw = (name, attributes) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    hover.append(shape);
  };
  const leave = () => {
    at = null;
    hover.replaceChildren();
    hideTip();
  };
  const show = (x, clientX, clientY) => {
    const shown = lines();
    if (!shown.length) return leave();
    hover.replaceChildren();
    // The first line decides where we are; the others answer with their nearest point.
    const first = shown.reduce((a, b) => {
      const [p, q] = [a.x[nearest(a.x, x)], b.x[nearest(b.x, x)]];
      return Math.abs(q - x) < Math.abs(p - x) ? b : a;
    });
    at = first.x[nearest(first.x, x)];
    draw("line", { x1: across(at), x2: across(at), y1: top, y2: bottom });
    const texts = [{ text: `${chart.x} ${Number(at.toPrecision(4))}` }];
    for (const line of shown) {
      const number = nearest(line.x, at);
      draw("circle", { cx: across(line.x[number]), cy: down(line.y[number]), r: 4, class: `c${line.colour}` });
      const note = line.notes[number] ? `, ${line.notes[number]}` : "";
      const value = Number(line.y[number].toPrecision(chart.digits));
      texts.push({ text: `${line.name}: ${value}${note}`, colour: line.colour });
    }
    showTip(texts, clientX, clientY);
  };
  const pointed = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    show(xLow + ((inside - left) / (right - left)) * (xHigh - xLow), event.clientX, event.clientY);
  };
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step || !lines().length) return;
    event.preventDefault();
    const places = [...new Set(lines().flatMap((line) => line.x))].sort((a, b) => a - b);
    const number = at === null ? (step > 0 ? 0 : places.length - 1) : places.indexOf(at) + step;
    const x = places[Math.max(0, Math.min(places.length - 1, number))];
    const box = svg.getBoundingClientRect();
    show(x, box.left + (across(x) / svg.viewBox.baseVal.width) * box.width, box.top + 20);
  });
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    if (!off.delete(run)) off.add(run);
    button.setAttribute("aria-pressed", String(!off.has(run)));
    for (const series of document.querySelectorAll(`.chart [data-run="${run}"]`)) series.toggleAttribute("hidden", off.has(run));
  });
}
