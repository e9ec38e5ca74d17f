// Ranked lists: one image at a time, and what of it is ranked.
for (const ranking of document.querySelectorAll(".ranking")) {
  const figures = [...ranking.querySelectorAll("figure.list")];
  const [which, what] = [".which", ".what"].map((name) => ranking.querySelector(name));
  const show = () => {
    for (const figure of figures) figure.hidden = figure.dataset.image !== which.value || figure.dataset.ranked !== what.value;
  };
  for (const select of [which, what]) select.addEventListener("change", show);
  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    probe(svg, [...svg.querySelectorAll(".item")]);
  }
  show(); // a browser that comes back to the page may remember another choice
}
