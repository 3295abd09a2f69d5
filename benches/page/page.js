// Draws the charts of the page: unpacks the library, gives each chart the colours of the style sheet and the room that
// its legend needs, and draws again where colours or widths change. Nothing is fetched or stored; how a chart looks is
// decided where it is made, and all numbers stand in the tables too.
"use strict";

(async () => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = (element) => JSON.parse(element.textContent);
  const look = data(document.getElementById("look"));
  const plots = all(".plot").map((div) => ({ div, spec: data(div.firstElementChild) }));
  const hidden = new Set();

  // A modebar above each chart; what a drag on it does: it zooms, but for a finger, which scrolls the page.
  const buttons = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]];
  const config = { displaylogo: false, modeBarButtons: buttons };
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  /** A copy in which var(--name) is the colour that the style sheet gives this name now. */
  function painted(value) {
    const style = getComputedStyle(document.documentElement);
    const paint = (key, each) => (/^var\(--\w+\)$/.test(each) ? style.getPropertyValue(each.slice(4, -1)).trim() : each);
    return JSON.parse(JSON.stringify(value), paint);
  }

  /** Height of a legend: its entries fill line after line. */
  function room(names, wide) {
    let [lines, at] = [1, 0];
    for (const entry of names.map((name) => 7 * name.length + 56)) {
      if (at > 0 && at + entry > wide - 24) [lines, at] = [lines + 1, 0];
      at += entry;
    }
    return 20 * lines;
  }

  function draw({ div, spec }) {
    const { data: traces, layout } = painted(spec);
    const names = traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const legend = room(names, div.clientWidth);
    for (const trace of traces) if (hidden.has(trace.legendgroup)) trace.visible = "legendonly";
    Object.assign(layout, { template: painted(look), dragmode, uirevision: 1, legend: { maxheight: legend + 60 } });
    layout.margin = { ...look.layout.margin, b: look.layout.margin.b + legend };
    layout.width = div.clientWidth;
    layout.height += legend;
    return Plotly.react(div, traces, layout, config);
  }

  async function drawAll() {
    for (const plot of plots) {
      await draw(plot);
      await new Promise((resume) => setTimeout(resume)); // the reader may scroll meanwhile
    }
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (each) => each.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }

  function choose({ target }) {
    if (target.checked) hidden.delete(target.value);
    else hidden.add(target.value);
    for (const each of all("tr [data-rival]")) each.closest("tr").hidden = hidden.has(each.dataset.rival);
    for (const plot of plots.filter(({ spec }) => spec.data.some((trace) => trace.legendgroup === target.value))) draw(plot);
  }

  await unpack(document.getElementById("library").textContent);
  for (const { div } of plots) div.replaceChildren();
  await drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", () => plots.forEach(draw)); // what is not drawn at once is not printed
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== wide) drawAll();
    wide = innerWidth;
  });
  const rivals = document.querySelector(".rivals");
  rivals.hidden = false;
  rivals.addEventListener("change", choose);
  document.documentElement.classList.add("drawn");
})();
