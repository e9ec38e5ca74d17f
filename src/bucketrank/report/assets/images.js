// Images: show and hide boxes by score and by class.
for (const images of document.querySelectorAll(".images")) {
  const [slider, select, groundTruth] = [".score", ".class", ".ground-truth"].map((name) => images.querySelector(name));
  const output = images.querySelector("output");
  const figures = [...images.querySelectorAll("figure.image")];
  const detections = [...images.querySelectorAll(".detection")];
  const scores = detections.map((detection) => Number(detection.dataset.score)).sort((a, b) => a - b);
  const storedThreshold = Number(images.dataset.threshold);
  let threshold = storedThreshold;

  // The slider selects a quantile of the scores: the scores of a ranking loss may all be close together.
  const scoreAt = (quantile) =>
    quantile >= 1 ? (scores.at(-1) ?? 1) : scores[Math.floor(quantile * scores.length)] ?? 0;
  const quantileOf = (score) => (scores.length ? scores.filter((each) => each < score).length / scores.length : 0);

  const update = () => {
    const text = threshold === 0 ? "0" : String(Number(threshold.toPrecision(3)));
    output.textContent = text;
    slider.setAttribute("aria-valuetext", `score ${text}`);
    for (const figure of figures) {
      const counts = { correct: 0, wrong: 0, missed: 0 };
      for (const shape of figure.querySelectorAll(".detection, .object")) {
        const inClass = !select.value || shape.dataset.class === select.value;
        const scoredEnough = Number(shape.dataset.score ?? -1) >= threshold;
        const names = shape.classList;
        if (names.contains("detection")) {
          shape.toggleAttribute("hidden", !(inClass && scoredEnough));
          if (inClass && scoredEnough && names.contains("correct")) counts.correct += 1;
          if (inClass && scoredEnough && names.contains("wrong")) counts.wrong += 1;
        } else {
          shape.toggleAttribute("hidden", !(inClass && groundTruth.checked));
          if (!names.contains("crowd")) {
            names.toggle("missed", !scoredEnough);
            names.toggle("detected", scoredEnough);
            if (inClass && !scoredEnough) counts.missed += 1;
          }
        }
      }
      const summary = figure.querySelector(".counts");
      if (summary) summary.textContent = `${counts.correct} correct, ${counts.wrong} wrong, ${counts.missed} missed`;
      const total = 2 * counts.correct + counts.wrong + counts.missed;
      const f1 = figure.querySelector("figcaption b");
      if (f1) f1.textContent = total ? `F1 ${((2 * counts.correct) / total).toFixed(2)}` : "";
    }
  };
  const reset = () => {
    threshold = storedThreshold;
    slider.value = 1000 * quantileOf(storedThreshold);
    update();
  };
  slider.addEventListener("input", () => {
    threshold = scoreAt(Number(slider.value) / 1000);
    update();
  });
  select.addEventListener("change", update);
  groundTruth.addEventListener("change", update);
  images.querySelector(".reset").addEventListener("click", reset);
  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    if (svg) showTipsFor(svg, [...svg.querySelectorAll(".detection, .object")]);
  }
  reset();
}
