// Goes into a copy of a page, in a frame of its own: notes every error and, once all is drawn, what stands where. What
// it saw becomes an attribute of the outer page, called as the frame is. See browser.py.
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
  const visible = (text) => getComputedStyle(text).display !== "none" && text.textContent.trim() !== "";
  const apart = (one, other) =>
    one.right - 1 <= other.left || other.right - 1 <= one.left || one.bottom - 2 <= other.top || other.bottom - 2 <= one.top;

  function drawing(svg) {
    const box = svg.getBoundingClientRect();
    const texts = all("text", svg).filter(visible).map((text) => ({ words: text.textContent, box: text.getBoundingClientRect() }));
    const cut = texts.filter(({ box: each }) => each.left < box.left - 1 || each.right > box.right + 1 || each.bottom > box.bottom + 1);
    const overlaps = [];
    texts.forEach((one, at) => {
      for (const other of texts.slice(at + 1)) if (!apart(one.box, other.box)) overlaps.push(`${one.words} / ${other.words}`);
    });
    return { name: svg.dataset.name, width: box.width, height: box.height, cut: cut.map((each) => each.words), overlaps };
  }

  function beyond() {
    const width = document.documentElement.clientWidth;
    const wide = (each) => each.getBoundingClientRect().right > width + 1 && !each.closest(".scroll");
    return all("body *").filter(wide).map((each) => `${each.tagName}.${each.getAttribute("class")}`);
  }

  function point(svg) {
    const box = svg.getBoundingClientRect();
    const at = { clientX: box.left + 0.6 * box.width, clientY: box.top + 0.3 * box.height, bubbles: true };
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    const read = document.querySelector(".readout");
    const words = read.hidden ? "" : read.textContent;
    const inside = read.getBoundingClientRect().right <= document.documentElement.clientWidth;
    svg.dispatchEvent(new PointerEvent("pointerleave", at));
    return { words, inside, gone: read.hidden };
  }

  function hide() {
    const input = document.querySelector(".rivals input");
    if (!input) return null;
    const mine = () => all("[data-rival]").filter((each) => each.dataset.rival === input.value);
    const off = () => mine().filter((each) => (each.closest("tr") || each).classList.contains("off")).length;
    input.click();
    const after = off();
    input.click();
    return { marked: mine().length, after, back: off() };
  }

  addEventListener("load", () => {
    for (const svg of all("svg")) svg.dataset.name = svg.querySelector("title")?.textContent || svg.getAttribute("aria-label");
    const root = document.documentElement;
    const seen = {
      width: innerWidth,
      dark: matchMedia("(prefers-color-scheme: dark)").matches,
      background: getComputedStyle(document.body).backgroundColor,
      ink: getComputedStyle(document.body).color,
      drawings: all("svg").map(drawing),
      scroll: root.scrollWidth - root.clientWidth,
      beyond: beyond(),
      read: all("svg[data-x]").map(point),
      hide: hide(),
    };
    parent.document.documentElement.dataset[name] = JSON.stringify({ ...seen, errors });
  });
})();
