// Small helpers: elements of the page, and numbers as short texts.

const byId = (id) => document.getElementById(id);

// An element with attributes and children.
function made(name, attributes = {}, ...children) {
  const svg = ["g", "circle", "path", "line", "text"].includes(name);
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const msText = (ms) => `${ms < 10 ? ms.toFixed(2) : ms.toFixed(1)} ms`;
const residualText = (value) => (value >= 0.01 ? value.toFixed(3) : value.toExponential(1));
const stepsText = (n) => (n === 1 ? "1 step" : `${n} steps`);
