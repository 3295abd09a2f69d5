// Goes into a copy of a page, in a frame of its own: notes every error and, once all charts are drawn, what stands where
// and what a reader's mouse does. What it saw becomes an attribute of the outer page, named as the frame is. See browser.py.
"use strict";

(() => {
  const errors = [];
  const note = (kind, text) => errors.push(`${kind}: ${text}`);
  const loud = console.error;
  console.error = (...words) => {
    note("console", words.join(" "));
    loud(...words);
  };
  addEventListener("error", (event) => note("error", event.message || event.target?.tagName), true);
  addEventListener("unhandledrejection", (event) => note("rejection", event.reason));
  addEventListener("securitypolicyviolation", (event) => note("policy", `${event.violatedDirective} ${event.blockedURI}`));

  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const pause = (ms) => new Promise((resume) => setTimeout(resume, ms));
  const visible = (text) => getComputedStyle(text).display !== "none" && text.textContent.trim() !== "";
  const apart = (one, other) =>
    one.right - 2 <= other.left || other.right - 2 <= one.left || one.bottom - 3 <= other.top || other.bottom - 3 <= one.top;

  function drawing(plot) {
    const box = plot.getBoundingClientRect();
    const found = all("text", plot).filter(visible);
    const texts = found.map((text) => ({ words: text.textContent, box: text.getBoundingClientRect() }));
    const cut = texts.filter(({ box: each }) => each.left < box.left - 1 || each.right > box.right + 1 || each.bottom > box.bottom + 1);
    const overlaps = [];
    texts.forEach((one, at) => {
      for (const other of texts.slice(at + 1)) if (!apart(one.box, other.box)) overlaps.push(`${one.words} / ${other.words}`);
    });
    const colours = [...new Set(found.map((text) => getComputedStyle(text).fill))];
    const shapes = all(".scatterlayer path, .barlayer path", plot).length;
    const name = plot.closest("figure")?.querySelector("h3").textContent || "";
    return { name, width: box.width, height: box.height, cut: cut.map((each) => each.words), overlaps, colours, shapes };
  }

  function beyond() {
    const width = document.documentElement.clientWidth;
    const wide = (each) => each.getBoundingClientRect().right > width + 1 && !each.closest(".scroll") && !each.closest("svg g");
    return all("body *").filter(wide).map((each) => `${each.tagName}.${each.getAttribute("class")}`);
  }

  const fire = (target, kind, x, y) =>
    target.dispatchEvent(new MouseEvent(kind, { clientX: x, clientY: y, bubbles: true, cancelable: true, button: 0, view: window }));

  /** The values that a mouse above the chart makes it show. */
  async function hover(plot) {
    const field = plot.querySelector(".nsewdrag");
    const box = field.getBoundingClientRect();
    const bars = plot.data.some((trace) => trace.type === "bar" && trace.name !== "noise");
    const mark = plot.querySelector(bars ? ".barlayer path" : ".scatterlayer .points path").getBoundingClientRect();
    fire(field, "mousemove", mark.left + mark.width / 2, mark.top + mark.height / 2);
    await pause(120);
    const words = all(".hoverlayer text", plot).map((text) => text.textContent).join(" ");
    fire(field, "mouseout", box.left - 5, box.top - 5);
    await pause(120);
    return words;
  }

  /** Whether the chart shows all of itself at first, after a drag across it, and after the button that undoes this. */
  async function zoom(plot) {
    const whole = () => plot._fullLayout.xaxis.autorange === true && plot._fullLayout.yaxis.autorange === true;
    const field = plot.querySelector(".nsewdrag");
    const box = field.getBoundingClientRect();
    const [x, y] = [(part) => box.left + part * box.width, (part) => box.top + part * box.height];
    const seen = [whole()];
    fire(field, "mousedown", x(0.2), y(0.2));
    fire(document, "mousemove", x(0.4), y(0.4));
    fire(document, "mousemove", x(0.6), y(0.7));
    fire(document, "mouseup", x(0.6), y(0.7));
    await pause(400);
    seen.push(whole());
    plot.querySelector('.modebar-btn[data-title="Reset axes"]').click();
    await pause(100);
    return [...seen, whole()];
  }

  /** Whether the first entry of the legend switches its rival off, and on again. */
  async function toggle(plot) {
    const seen = [];
    for (let round = 0; round < 2; round += 1) {
      const target = plot.querySelector(".legendtoggle");
      const box = target.getBoundingClientRect();
      fire(target, "mousedown", box.left + 5, box.top + 5);
      fire(target, "mouseup", box.left + 5, box.top + 5);
      await pause(700);
      seen.push(plot.data[0].visible);
    }
    return seen;
  }

  /** How many rows of tables and how many traces a box of the choice takes away, and how many stay away. */
  async function hide() {
    const input = document.querySelector(".rivals input");
    if (!input) return null;
    const rows = () => all("tr [data-rival]").filter((each) => each.dataset.rival === input.value);
    const traces = () => all(".plot").flatMap((plot) => plot.data.filter((trace) => trace.legendgroup === input.value));
    const off = () => rows().filter((each) => each.closest("tr").hidden).length + traces().filter((each) => each.visible === "legendonly").length;
    const seen = [rows().length + traces().length];
    for (let round = 0; round < 2; round += 1) {
      input.click();
      await pause(50);
      seen.push(off());
    }
    return seen;
  }

  /** How many charts are wider than their card, and the page than the window, after that has become narrower. */
  async function shrink(plots) {
    frameElement.width = innerWidth - (innerWidth > 1000 ? 400 : 40);
    const root = document.documentElement;
    const wide = (plot) => plot.querySelector("svg").getBoundingClientRect().width > plot.clientWidth + 1;
    const left = () => plots.filter(wide).length + root.scrollWidth - root.clientWidth;
    for (let tries = 0; tries < 200 && left() > 0; tries += 1) {
      await new Promise(requestAnimationFrame); // a frame has to be shown before a page is told of its width
      await pause(20);
    }
    return left();
  }

  async function look() {
    while (document.getElementById("library") && !document.documentElement.classList.contains("drawn") && !errors.length) await pause(20);
    const [root, plots] = [document.documentElement, all(".plot")];
    const seen = {
      width: innerWidth,
      dark: matchMedia("(prefers-color-scheme: dark)").matches,
      background: getComputedStyle(document.body).backgroundColor,
      ink: getComputedStyle(document.body).color,
      card: getComputedStyle(document.querySelector(".card") || document.body).backgroundColor,
      drawings: plots.map(drawing),
      scroll: root.scrollWidth - root.clientWidth,
      beyond: beyond(),
      hover: [],
    };
    if (frameElement.dataset.mouse && plots.length && !errors.length) {
      for (const plot of plots) seen.hover.push(await hover(plot));
      const lines = plots.find((plot) => plot.data.every((trace) => trace.type === "scatter"));
      if (lines) Object.assign(seen, { zoom: await zoom(lines), toggle: await toggle(lines) });
      seen.hide = await hide();
      seen.shrunk = await shrink(plots);
    }
    parent.document.documentElement.dataset[name] = JSON.stringify({ ...seen, errors });
  }

  addEventListener("load", look);
})();
