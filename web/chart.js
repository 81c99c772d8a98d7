// The race as a picture: residual (logarithmic) against milliseconds, a mark with its digit for each answer.

function showChart({ teacher, student }, right) {
  const chart = byId("chart");
  const [width, height] = [chart.clientWidth, chart.clientHeight];
  const [left, bottom, top, end] = [40, height - 34, 28, width - 12];
  const rows = [...teacher, ...student];
  const latestMs = Math.max(...rows.map((row) => row.ms)) * 1.02;
  const powers = rows.map((row) => Math.log10(row.answers[0].residual));
  const [low, high] = [Math.min(Math.log10(settings.tolerance), ...powers), Math.max(0, ...powers)];
  const across = (ms) => left + ((end - left) * ms) / latestMs;
  const down = (power) => top + ((bottom - top) * (high - power)) / (high - low);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren();
  for (let power = Math.ceil(low); power <= high; power++) {
    const y = down(power);
    chart.append(made("line", { class: "grid", x1: left, x2: end, y1: y, y2: y }),
      made("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, power ? `10${superscript(power)}` : "1"));
  }
  const tick = niceTick(latestMs, width < 500 ? 4 : 7);
  for (let i = 0; i * tick <= latestMs; i++)
    chart.append(made("text", { x: across(i * tick), y: bottom + 18, "text-anchor": "middle" },
      String(Number((i * tick).toPrecision(3)))));
  chart.append(made("text", { x: end, y: height - 2, "text-anchor": "end" }, "milliseconds"),
    made("text", { x: 0, y: 12 }, "residual"));
  for (const [name, rows] of [["teacher", teacher], ["student", student]]) {
    const points = rows.map((row) => [across(row.ms), down(Math.log10(row.answers[0].residual))]);
    const group = made("g", { class: name }, made("path", { d: `M${points.join("L")}` }));
    rows.forEach((row, i) => {
      const best = bestClass(row.answers[0].probabilities);
      group.append(made("g", { class: best === right ? "mark right" : "mark" },
        made("circle", { cx: points[i][0], cy: points[i][1], r: 9 }),
        made("text", { x: points[i][0], y: points[i][1] + 4 }, String(best))));
    });
    chart.append(group);
  }
}

const superscript = (power) =>
  [...String(power)].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻").join("");

// A round distance that cuts a length into at most `parts`.
function niceTick(length, parts) {
  const power = 10 ** Math.floor(Math.log10(length / parts));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => length / tick <= parts);
}
