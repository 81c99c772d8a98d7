// All test digits: how many are right after each step, in batches that leave the page alive.

const BATCH = 40;
const LISTED = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

async function runAll(models, settings, pixels) {
  const button = byId("all");
  button.disabled = true;
  const { labels } = settings;
  const batches = [];
  for (let first = 0; first < labels.length; first += BATCH) {
    const last = Math.min(first + BATCH, labels.length);
    const found = await compared(models, Array.from(pixels.subarray(64 * first, 64 * last)), settings);
    batches.push({ found, labels: labels.slice(first, last) });
    button.textContent = `${last} of ${labels.length}`;
    await pause(0);
  }
  byId("table").replaceChildren(testTable(batches, labels.length));
  button.textContent = "Run them all again";
  button.disabled = false;
}

// Accuracy and mean residual after `steps` steps; a batch whose iteration ended before that stays as it ended.
function tally(batches, who, steps) {
  const sum = { right: 0, residual: 0, digits: 0 };
  for (const { found, labels } of batches) {
    const row = found[who][Math.min(steps, found[who].length) - 1];
    row.answers.forEach(({ probabilities, residual }, i) => {
      sum.right += bestClass(probabilities) === labels[i];
      sum.residual += residual;
      sum.digits += 1;
    });
  }
  return sum;
}

function testTable(batches, digits) {
  const longest = Math.max(...batches.map(({ found }) => found.teacher.length));
  const student = batches[0].found.student.length;
  const rows = [...LISTED.filter((steps) => steps < longest), longest].map((steps) => {
    const cells = ["teacher", "student"].flatMap((who) => {
      if (who === "student" && steps > student) return [made("td"), made("td")];
      const { right, residual } = tally(batches, who, steps);
      return [
        made("td", {}, `${((100 * right) / digits).toFixed(1)}%`),
        made("td", {}, residualText(residual / digits)),
      ];
    });
    return made("tr", { "data-step": steps }, made("th", { scope: "row" }, stepsText(steps)), ...cells);
  });
  const titles = ["", "Teacher right", "residual", "Student right", "residual"];
  return made("table", {},
    made("thead", {}, made("tr", {}, ...titles.map((title) => made("th", { scope: "col" }, title)))),
    made("tbody", {}, ...rows));
}
