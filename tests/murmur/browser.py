"""Scripts that tests run in a browser."""

# Contrast of every element that has text of its own with what it stands on, by WCAG's formula.
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const x = c[i] / 255;
    return sum + weight * (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  }, 0);
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    let ground = element;
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const behind = (e) => parse(getComputedStyle(e).backgroundColor);
    while (ground && behind(ground)[3] === 0) ground = ground.parentElement;
    if (!ground) continue;
    const [a, b] = [light(parse(ink)), light(behind(ground))];
    const text = element.tagName + ":" + element.textContent.trim().slice(0, 30);
    found[text] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}"""
