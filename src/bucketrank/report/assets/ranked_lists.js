// Ranked lists: show the list of the chosen image and source.
for (const ranking of document.querySelectorAll(".ranking")) {
  const figures = [...ranking.querySelectorAll("figure.list")];
  const [image, source] = [".list-image", ".list-source"].map((name) => ranking.querySelector(name));
  const show = () => {
    for (const figure of figures) {
      figure.hidden = figure.dataset.image !== image.value || figure.dataset.source !== source.value;
    }
  };
  for (const select of [image, source]) select.addEventListener("change", show);
  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    showTipsFor(svg, [...svg.querySelectorAll(".item")]);
  }
  show(); // on return to the page, a browser may restore another choice
}
