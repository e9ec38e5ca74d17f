// The tip: a small box with the values at the pointer or at the shape chosen with the arrow keys.
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
  const pageWidth = document.documentElement.clientWidth;
  const left = x + 14 + size.width > pageWidth ? x - 14 - size.width : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, pageWidth - size.width - 4))}px`;
  tip.style.top = `${y - size.height - 12 < 4 ? y + 16 : y - size.height - 12}px`;
}

function hideTip() {
  tip.classList.remove("shown");
  tip.replaceChildren();
  tip.style.left = tip.style.top = "0px";
}

// Move the text of a title element to the tip: browsers would show it a second time, with a delay.
function moveTitle(element) {
  const title = element.querySelector(":scope > title");
  if (title) {
    element.dataset.tip = title.textContent;
    title.remove();
  }
}

// Show the tips of the shapes in a drawing, at the pointer or by arrow keys.
function showTipsFor(svg, shapes) {
  let current = null;
  const leave = () => {
    if (current) current.classList.remove("here");
    current = null;
    hideTip();
  };
  const enter = (shape, x, y) => {
    if (current && current !== shape) current.classList.remove("here");
    current = shape;
    shape.classList.add("here");
    showTip([{ text: shape.dataset.tip }], x, y);
  };
  shapes.forEach(moveTitle);
  const area = (shape) => {
    const box = shape.getBoundingClientRect();
    return box.width * box.height;
  };
  // Where boxes overlap, choose the smallest: the others can be reached elsewhere.
  const onPointer = (event) => {
    const under = document.elementsFromPoint(event.clientX, event.clientY).map((each) => each.closest("[data-tip]"));
    const candidates = under.filter((shape) => shape && svg.contains(shape));
    if (candidates.length) enter(candidates.reduce((a, b) => (area(b) < area(a) ? b : a)), event.clientX, event.clientY);
    else leave();
  };
  svg.addEventListener("pointermove", onPointer);
  svg.addEventListener("pointerdown", onPointer);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const shown = shapes.filter((shape) => !shape.hasAttribute("hidden"));
    if (!shown.length) return;
    const next = shown[(shown.indexOf(current) + step + shown.length) % shown.length] || shown[0];
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = next.getBoundingClientRect();
    enter(next, box.left + box.width / 2, box.top);
  });
}
