// The one small box that says what the pointer, the finger or the arrow keys are at.
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
document.body.append(tip);
document.documentElement.classList.add("scripts");

function showTip(lines, x, y) {
  tip.replaceChildren();
  lines.forEach((line, number) => {
    if (number) tip.append("\n");
    if (line.colour !== undefined) {
      const swatch = document.createElement("span");
      swatch.className = `swatch c${line.colour}`;
      tip.append(swatch);
    }
    tip.append(line.text);
  });
  tip.classList.add("shown");
  const size = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = x + 14 + size.width > room ? x - 14 - size.width : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, room - size.width - 4))}px`;
  tip.style.top = `${y - size.height - 12 < 4 ? y + 16 : y - size.height - 12}px`;
}

function hideTip() {
  tip.classList.remove("shown");
  tip.replaceChildren();
  tip.style.left = tip.style.top = "0px";
}

// The titles that browsers show by themselves would come second, and late: their text goes to our own box.
function takeTitle(element) {
  const title = element.querySelector(":scope > title");
  if (title) {
    element.dataset.tip = title.textContent;
    title.remove();
  }
}

// Shapes of one drawing that are pointed at, or gone through by the arrow keys.
function probe(svg, shapes) {
  let at = null;
  const leave = () => {
    if (at) at.classList.remove("here");
    at = null;
    hideTip();
  };
  const enter = (shape, x, y) => {
    if (at && at !== shape) at.classList.remove("here");
    at = shape;
    shape.classList.add("here");
    showTip([{ text: shape.dataset.tip }], x, y);
  };
  shapes.forEach(takeTitle);
  const area = (shape) => {
    const box = shape.getBoundingClientRect();
    return box.width * box.height;
  };
  // Of boxes that lie on each other the smallest is meant: the others can be pointed at elsewhere.
  const pointed = (event) => {
    const under = document.elementsFromPoint(event.clientX, event.clientY).map((each) => each.closest("[data-tip]"));
    const mine = under.filter((shape) => shape && svg.contains(shape));
    if (mine.length) enter(mine.reduce((a, b) => (area(b) < area(a) ? b : a)), event.clientX, event.clientY);
    else leave();
  };
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const shown = shapes.filter((shape) => !shape.hasAttribute("hidden"));
    if (!shown.length) return;
    const next = shown[(shown.indexOf(at) + step + shown.length) % shown.length] || shown[0];
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
    const place = next.getBoundingClientRect();
    enter(next, place.left + place.width / 2, place.top);
  });
}
