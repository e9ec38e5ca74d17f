// Tabs: with several runs, show one at a time.
const panels = [...document.querySelectorAll(".panel")];
if (panels.length > 1) {
  const bar = document.createElement("div");
  bar.className = "tabs";
  bar.setAttribute("role", "tablist");
  bar.setAttribute("aria-label", "Run");
  const choose = (chosen, focus) => {
    panels.forEach((panel, number) => {
      const tab = bar.children[number];
      panel.hidden = number !== chosen;
      tab.setAttribute("aria-selected", String(number === chosen));
      tab.tabIndex = number === chosen ? 0 : -1;
      if (focus && number === chosen) tab.focus();
    });
  };
  panels.forEach((panel, number) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.id = `tab-${number}`;
    tab.className = `c${number % 8}`;
    tab.textContent = panel.dataset.name;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panel.id);
    tab.addEventListener("click", () => choose(number, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) choose((number + step + panels.length) % panels.length, true);
    });
    bar.append(tab);
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", tab.id);
    panel.querySelector(".name").hidden = true;
  });
  panels[0].before(bar);
  choose(Math.max(0, panels.findIndex((panel) => panel.querySelector(".chart"))), false); // the first run with a chart
} else if (panels.length) {
  panels[0].querySelector(".name").hidden = true;
}
