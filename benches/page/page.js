// Makes the finished page handier: rivals can be hidden, values be read off. Law: nothing is fetched, stored or needed;
// without this script every plot and every number is there all the same.
"use strict";

(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const three = (value) => (value >= 99.95 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));

  function duration(us) {
    for (const [size, unit] of [[1, "\u00b5s"], [1e3, "ms"]]) if (us / size < 999.5) return `${three(us / size)} ${unit}`;
    return `${three(us / 1e6)} s`;
  }

  const WORDS = {
    us: duration,
    rate: (value) => `${three(value)} /s`,
    times: (value) => three(value),
    count: (value) => three(value),
    part: (value) => `after ${Math.round(100 * value)} % of the waiters`,
    nines: (place) => `percentile ${(100 * (1 - 10 ** -place)).toFixed(Math.max(0, Math.ceil(place) - 1))}`,
  };

  // ------------------------------------------------------------------------------------------------ rivals to be hidden

  const hidden = new Set();

  function show(rival, visible) {
    if (visible) hidden.delete(rival);
    else hidden.add(rival);
    for (const each of all("[data-rival]")) {
      if (each.dataset.rival === rival) (each.closest("tr") || each).classList.toggle("off", !visible);
    }
    for (const input of all(".rivals input")) if (input.value === rival) input.checked = visible;
  }

  const choice = document.querySelector(".rivals");
  if (choice) {
    choice.hidden = false;
    choice.addEventListener("change", (event) => show(event.target.value, event.target.checked));
  }
  for (const key of all(".key")) {
    key.addEventListener("click", () => show(key.dataset.rival, hidden.has(key.dataset.rival)));
  }

  // ------------------------------------------------------------------------------------------------ values to be read off

  function axis(text) {
    const [kind, low, high, start, end, unit] = text.split(" ");
    return { kind, low: +low, high: +high, start: +start, end: +end, unit: unit || kind };
  }

  function value(axis, place) {
    const part = (place - axis.start) / (axis.end - axis.start);
    if (axis.kind === "log") return axis.low * (axis.high / axis.low) ** part;
    return axis.low + part * (axis.high - axis.low);
  }

  const points = (line) => line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));

  function height(path, x) {
    if (x < path[0][0] - 0.5 || x > path.at(-1)[0] + 0.5) return null;
    const after = Math.max(1, path.findIndex((point) => point[0] >= x));
    const [[x0, y0], [x1, y1]] = [path[after - 1], path[after] || path[after - 1]];
    return x1 === x0 ? y1 : y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
  }

  const readout = document.createElement("div");
  readout.className = "readout";
  readout.hidden = true;
  document.body.append(readout);

  function entry(rival, words) {
    const line = document.createElement("div");
    const [name, text] = [document.createElement("span"), document.createElement("span")];
    name.textContent = rival;
    text.textContent = words;
    line.append(name, text);
    return line;
  }

  function read(plot, event) {
    const box = plot.svg.getBoundingClientRect();
    const scale = plot.svg.viewBox.baseVal.width / box.width;
    const [left, right] = [Math.min(plot.x.start, plot.x.end), Math.max(plot.x.start, plot.x.end)];
    let x = Math.min(right, Math.max(left, (event.clientX - box.left) * scale));
    if (plot.x.unit === "count") x = plot.stops.reduce((best, stop) => (Math.abs(stop - x) < Math.abs(best - x) ? stop : best));
    const found = plot.lines
      .filter((line) => !hidden.has(line.rival))
      .map((line) => [line.rival, height(line.path, x)])
      .filter((pair) => pair[1] !== null)
      .sort((one, other) => one[1] - other[1]);
    const head = document.createElement("b");
    head.textContent = (WORDS[plot.x.unit] || three)(value(plot.x, x)) + plot.suffix;
    readout.replaceChildren(head, ...found.map(([rival, y]) => entry(rival, WORDS[plot.y.unit](value(plot.y, y)))));
    readout.hidden = false;
    const wide = readout.offsetWidth;
    const right_of = event.clientX + 18 + wide < document.documentElement.clientWidth;
    const at = right_of ? event.clientX + 18 : Math.max(4, event.clientX - 18 - wide);
    readout.style.left = `${Math.max(0, Math.min(at, document.documentElement.clientWidth - wide - 4)) + window.scrollX}px`;
    readout.style.top = `${event.clientY + 14 + window.scrollY}px`;
    plot.cursor.setAttribute("x1", x);
    plot.cursor.setAttribute("x2", x);
    plot.cursor.style.visibility = "visible";
  }

  for (const svg of all("svg[data-x]")) {
    const lines = all(".series", svg).map((series) => ({ rival: series.dataset.rival, path: points(series.querySelector("polyline")) }));
    const plot = { svg, lines, x: axis(svg.dataset.x), y: axis(svg.dataset.y), cursor: svg.querySelector(".cursor") };
    plot.stops = lines.flatMap((line) => line.path.map((point) => point[0]));
    plot.suffix = plot.x.unit === "count" ? ` ${svg.dataset.across || ""}` : "";
    const title = svg.querySelector("title"); // read aloud from now on, no longer shown over the values
    svg.setAttribute("aria-label", title.textContent);
    title.remove();
    const away = () => {
      readout.hidden = true;
      plot.cursor.style.visibility = "hidden";
    };
    svg.addEventListener("pointermove", (event) => (event.target.closest(".key") ? away() : read(plot, event)));
    svg.addEventListener("pointerdown", (event) => event.target.closest(".key") || read(plot, event));
    svg.addEventListener("pointerleave", away);
  }
  document.documentElement.classList.add("live");
})();
