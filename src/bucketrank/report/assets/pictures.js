// Images: which boxes are shown, by score and by class.
for (const images of document.querySelectorAll(".images")) {
  const [slider, select, truth] = [".score", ".class", ".truth"].map((name) => images.querySelector(name));
  const output = images.querySelector("output");
  const figures = [...images.querySelectorAll("figure.picture")];
  const scores = [...images.querySelectorAll(".found")].map((found) => Number(found.dataset.score)).sort((a, b) => a - b);
  const stored = Number(images.dataset.threshold);
  let limit = stored;

  // The slider goes by the order of the scores, not their size: those of a ranking loss may all lie close together.
  const scoreAt = (share) => (share >= 1 ? (scores.at(-1) ?? 1) : scores[Math.floor(share * scores.length)] ?? 0);
  const shareOf = (score) => (scores.length ? scores.filter((each) => each < score).length / scores.length : 0);

  const update = () => {
    const text = limit === 0 ? "0" : String(Number(limit.toPrecision(3)));
    output.textContent = text;
    slider.setAttribute("aria-valuetext", `score ${text}`);
    for (const figure of figures) {
      const counts = { right: 0, wrong: 0, missed: 0 };
      for (const shape of figure.querySelectorAll(".found, .true")) {
        const wanted = !select.value || shape.dataset.class === select.value;
        const reached = Number(shape.dataset.score ?? -1) >= limit;
        const kind = shape.classList;
        if (kind.contains("found")) {
          shape.toggleAttribute("hidden", !(wanted && reached));
          if (wanted && reached && kind.contains("right")) counts.right += 1;
          if (wanted && reached && kind.contains("wrong")) counts.wrong += 1;
        } else {
          shape.toggleAttribute("hidden", !(wanted && truth.checked));
          if (!kind.contains("crowd")) {
            kind.toggle("missed", !reached);
            kind.toggle("met", reached);
            if (wanted && !reached) counts.missed += 1;
          }
        }
      }
      const told = figure.querySelector(".counts");
      if (told) told.textContent = `${counts.right} right, ${counts.wrong} false, ${counts.missed} missed`;
      const total = 2 * counts.right + counts.wrong + counts.missed;
      const f1 = figure.querySelector("figcaption b");
      if (f1) f1.textContent = total ? `F1 ${((2 * counts.right) / total).toFixed(2)}` : "";
    }
  };
  const reset = () => {
    limit = stored;
    slider.value = 1000 * shareOf(stored);
    update();
  };
  slider.addEventListener("input", () => {
    limit = scoreAt(Number(slider.value) / 1000);
    update();
  });
  select.addEventListener("change", update);
  truth.addEventListener("change", update);
  images.querySelector(".reset").addEventListener("click", reset);
  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    if (svg) probe(svg, [...svg.querySelectorAll(".found, .true")]);
  }
  reset();
}
