// Values under the pointer, for every chart that carries its points (attribute data-hover).
"use strict";

function short(value) {
  const rounded = +value.toPrecision(4), size = Math.abs(rounded);
  if (size && size < 0.001) return value.toExponential(1);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${+(rounded / (letter === "k" ? 1e3 : unit)).toPrecision(4)}${letter}`;
  }
  return `${+rounded.toPrecision(size < 1 ? 3 : 4)}`;
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The index of the point of a line that is nearest to x.
function nearest(line, x) {
  let best = 0;
  line.x.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(line.x[best] - x)) best = i; });
  return best;
}

function follow(svg) {
  const { box: [left, top, right, bottom], range: [low, high], label, lines } = JSON.parse(svg.dataset.hover);
  const tip = element("div", { class: "tip", hidden: "", role: "status" }), rule = element("div", { class: "rule", hidden: "" });
  const place = element("div", { class: "plot" });
  svg.replaceWith(place);
  place.append(svg, rule, tip);
  svg.setAttribute("tabindex", "0");
  const steps = [...new Set(lines.flatMap((line) => line.x))].filter((x) => x >= low && x <= high).sort((a, b) => a - b);
  let at = null;

  function show(index) {
    at = index;
    tip.hidden = rule.hidden = index === null;
    if (index === null) return;
    const x = steps[index], share = left + (x - low) / (high - low || 1) * (right - left);
    rule.style.cssText = `left:${100 * share}%;top:${100 * top}%;bottom:${100 * (1 - bottom)}%`;
    const rows = lines.map((line) => {
      const i = nearest(line, x), y = line.y[i];
      if (y === null || x < line.x[0] || x > line.x.at(-1)) return null;
      const interval = line.low && line.low[i] !== null ? element("small", {}, ` ${short(line.low[i])} … ${short(line.high[i])}`) : "";
      const swatch = element("i", {});
      swatch.style.background = line.color;
      return element("div", {}, swatch, line.name ? `${line.name} ` : "", element("b", {}, short(y)), interval);
    });
    tip.replaceChildren(element("div", {}, `${label} ${short(x)}`), ...rows.filter(Boolean));
    const room = place.clientWidth - tip.offsetWidth;
    const beside = share * place.clientWidth + (share > 0.5 ? -tip.offsetWidth - 10 : 10);
    tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  }

  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), share = (event.clientX - frame.left) / frame.width;
    const x = low + (share - left) / (right - left) * (high - low);
    if (steps.length) show(nearest({ x: steps }, x));
  });
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const last = steps.length - 1;
    const to = { ArrowLeft: (at ?? last + 1) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    show(to === null ? null : Math.max(0, Math.min(last, to)));
  });
}

document.querySelectorAll("svg[data-hover]").forEach(follow);
