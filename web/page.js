// The page: drawing, and showing what the models answer.

const settings = JSON.parse(document.getElementById("settings").textContent);
const drawing = byId("drawing");
const PEN = drawing.width / 16;
const LIFTED = 250; // milliseconds after which a drawing is taken for finished

const testPixels = Uint8Array.from(atob(settings.pixels), (letter) => letter.charCodeAt(0));
const testDigit = (i) => Array.from(testPixels.subarray(64 * i, 64 * (i + 1)));

let models = null;
let strokes = []; // [[x, y], ...] in pixels of the canvas
let counts = null; // the 64 numbers that the models see; null: nothing to show
let label = null; // the right digit, if it is known
let latest = 0; // the number of the last change: an answer to an earlier one is out of date
let busy = Promise.resolve(); // sessions run one after the other

// Drawing.

function place(event) {
  const box = drawing.getBoundingClientRect();
  const scale = drawing.width / box.width;
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
}

function paintStrokes() {
  const pen = drawing.getContext("2d");
  pen.clearRect(0, 0, drawing.width, drawing.height);
  pen.lineWidth = PEN;
  pen.lineCap = pen.lineJoin = "round";
  pen.strokeStyle = "#20242c";
  if (!strokes.length && !counts) {
    pen.fillStyle = "#8b929c";
    pen.textAlign = "center";
    pen.font = "40px system-ui, sans-serif";
    pen.fillText("draw a digit here", drawing.width / 2, drawing.height / 2);
  }
  for (const stroke of strokes) {
    pen.beginPath();
    stroke.forEach(([x, y]) => pen.lineTo(x, y));
    if (stroke.length === 1) pen.lineTo(...stroke[0]);
    pen.stroke();
  }
}

// 64 counts as squares of grey.
function paintCounts(canvas, values) {
  const pen = canvas.getContext("2d");
  const side = canvas.width / 8;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  (values ?? []).forEach((count, i) => {
    pen.fillStyle = `rgba(32, 36, 44, ${count / 16})`;
    pen.fillRect((i % 8) * side, Math.floor(i / 8) * side, side, side);
  });
}

function onPen(event) {
  event.preventDefault();
  if (event.type === "pointerdown") {
    drawing.setPointerCapture(event.pointerId);
    if (!strokes.length) choose(null);
    strokes.push([]);
  }
  const known = strokes.at(-1).length ? (event.getCoalescedEvents?.() ?? []) : [];
  strokes.at(-1).push(...(known.length ? known : [event]).map(place));
  drawn();
}

let penDown = false;
drawing.addEventListener("pointerdown", (event) => {
  if (penDown || event.button) return;
  penDown = true;
  onPen(event);
});
drawing.addEventListener("pointermove", (event) => {
  if (penDown) onPen(event);
});
for (const name of ["pointerup", "pointercancel"])
  drawing.addEventListener(name, () => {
    if (!penDown) return;
    penDown = false;
    drawn();
  });

function drawn() {
  counts = strokes.length ? reducedDrawing(strokes, settings.ink) : null;
  paintStrokes();
  changed();
}

byId("clear").addEventListener("click", () => {
  strokes = [];
  choose(null);
  drawn();
});
byId("undo").addEventListener("click", () => {
  strokes.pop();
  drawn();
});

// The right digit: chosen by hand, known for a test digit, or null.
function choose(digit) {
  label = digit;
  for (const input of byId("labels").querySelectorAll("input"))
    input.checked = digit !== null && Number(input.value) === digit;
}

for (let digit = 0; digit < CLASSES; digit++) {
  const input = made("input", { type: "radio", name: "label", value: digit, "aria-label": digit });
  // A second click takes the choice back.
  input.addEventListener("click", () => {
    choose(label === digit ? null : digit);
    if (shown) show(shown);
  });
  byId("labels").append(made("label", {}, input, made("span", {}, String(digit))));
  // The first test digit of each class, whatever the models make of it.
  const index = settings.labels.indexOf(digit);
  const picture = made("canvas", { width: 32, height: 32 });
  paintCounts(picture, testDigit(index));
  const button = made("button", { type: "button", "aria-label": `Test digit ${digit}` }, picture);
  button.addEventListener("click", () => takeTestDigit(index));
  byId("samples").append(button);
}

function takeTestDigit(index) {
  strokes = [];
  counts = testDigit(index);
  choose(settings.labels[index]);
  paintCounts(drawing, counts);
  changed();
}

// Answers. While the pen is down they follow it; the milliseconds are measured when it has been lifted.

function changed() {
  const number = ++latest;
  paintCounts(byId("seen"), counts);
  byId("undo").disabled = !strokes.length;
  if (!models) return;
  busy = busy.then(() => (number === latest ? answer(number) : undefined)).catch(failed);
}

async function answer(number) {
  if (!counts) return clearAnswers();
  const wanted = () => number === latest && !penDown;
  show(await compared(models, counts, settings), false);
  await pause(penDown ? 0 : LIFTED);
  if (!wanted()) return;
  const found = await measured(models, counts, settings, wanted);
  if (!found) return;
  show(found);
}

let shown = null; // the last measured answers

function clearAnswers() {
  shown = null;
  byId("race").classList.remove("measuring");
  for (const id of ["together", "more", "last", "chart"]) byId(id).replaceChildren();
  byId("toggle").hidden = true;
  for (const id of ["nearness", "rounds"]) byId(id).textContent = "";
  say("", "Draw a digit.", "Large or small: it is scaled to fit.");
}

function say(who, title, text) {
  byId("verdict").className = who;
  byId("verdict").replaceChildren(made("strong", {}, title), made("span", {}, text));
}

function show(found, timed = true) {
  shown = timed ? found : null;
  const last = ({ answers }) => bestClass(answers[0].probabilities);
  const right = label ?? last(found.teacher.at(-1));
  showSteps(found, right);
  byId("race").classList.toggle("measuring", !timed);
  if (timed) {
    showVerdict(found, right);
    showChart(found, right);
  } else {
    const title = `Teacher: “${last(found.teacher.at(-1))}”. Student: “${last(found.student.at(-1))}”.`;
    say("", title, penDown ? "Lift the pen, and it is measured who was first." : "Measuring …");
  }
}

function showVerdict({ teacher, student, rounds }, right) {
  const runners = {
    teacher: settledAt(teacher, right),
    student: settledAt(student, right),
  };
  const known = label === null ? `“${right}”, as the teacher's equilibrium says` : `“${right}”`;
  const when = (name) => {
    const row = runners[name];
    if (!row) return `The ${name} does not get there.`;
    return `${name[0].toUpperCase()}${name.slice(1)}: after ${stepsText(row.steps)}, ${msText(row.ms)}.`;
  };
  const arrived = Object.keys(runners).filter((name) => runners[name]);
  arrived.sort((a, b) => runners[a].ms - runners[b].ms);
  const first = arrived[0] ?? "";
  const title = first ? `The ${first} is right first: ${known}.` : `Neither answers ${known}.`;
  say(first, title, `${when("student")} ${when("teacher")}`);
  byId("nearness").textContent = nearnessText(teacher, student);
  byId("rounds").textContent = `Milliseconds of each run: the least of ${rounds} rounds.`;
}

// How long the teacher takes to come as near to its equilibrium as the student at its last step.
function nearnessText(teacher, student) {
  const own = student.at(-1);
  const { residual } = own.answers[0];
  const level = teacher.find((row) => row.answers[0].residual <= residual);
  const reached = `A residual of ${residualText(residual)} takes the student ${stepsText(own.steps)}, ${msText(own.ms)}`;
  if (!level) return `${reached}; the teacher does not go that far.`;
  return `${reached}; the teacher ${stepsText(level.steps)}, ${msText(level.ms)}.`;
}

// One answer: the digit, ten bars, residual and time.
function answerCell(who, row, right) {
  const [{ probabilities, residual }] = row.answers;
  const best = bestClass(probabilities);
  const bars = probabilities.map((p, digit) =>
    made("div", digit === best ? { class: "best" } : {},
      made("i", { style: `height: ${(34 * p).toFixed(1)}px` }), made("small", {}, String(digit))));
  const percent = probabilities.map((p, digit) => `${digit}: ${(100 * p).toFixed(0)}%`).join(", ");
  const cell = made("td", { class: `${who}${best === right ? " right" : ""}`, "data-step": row.steps },
    made("div", { class: "answer" },
      made("div", { class: "digit" }, String(best)),
      made("div", { class: "bars", role: "img", "aria-label": percent }, ...bars),
      made("div", { class: "figures" },
        made("b", { class: "ms" }, msText(row.ms)), made("br"),
        made("span", { class: "residual", title: "residual" }, `res. ${residualText(residual)}`))));
  cell.dataset.probabilities = JSON.stringify(probabilities);
  return cell;
}

function showSteps({ teacher, student }, right) {
  const line = (steps, ...cells) => made("tr", {}, made("th", { scope: "row" }, String(steps)), ...cells);
  const note = (text) => made("td", { class: "done" }, text);
  const count = student.length;
  const paired = student.map((row, i) =>
    line(row.steps,
      i < teacher.length ? answerCell("teacher", teacher[i], right) : note("already at its equilibrium"),
      answerCell("student", row, right)));
  byId("together").replaceChildren(...paired);
  const middle = teacher.slice(count, -1);
  byId("more").replaceChildren(...middle.map((row) => line(row.steps, answerCell("teacher", row, right), note(""))));
  const rest = [];
  if (teacher.length > count) {
    const done = teacher.at(-1).answers[0].residual <= settings.tolerance;
    const text = done ? "← the teacher's equilibrium" : "← the teacher gives up";
    rest.push(line(teacher.length, answerCell("teacher", teacher.at(-1), right), note(text)));
  }
  byId("last").replaceChildren(...rest);
  const button = byId("toggle");
  button.hidden = !middle.length;
  const range = middle.length > 1 ? `steps ${count + 1} to ${teacher.length - 1}` : `step ${count + 1}`;
  button.textContent = `${byId("more").hidden ? "Show" : "Hide"} the teacher's ${range}`;
}

byId("toggle").addEventListener("click", () => {
  const more = byId("more");
  more.hidden = !more.hidden;
  const button = byId("toggle");
  button.setAttribute("aria-expanded", String(!more.hidden));
  button.textContent = button.textContent.replace(/^\w+/, more.hidden ? "Show" : "Hide");
});

addEventListener("resize", () => shown && show(shown));

function failed(error) {
  say("", "This browser cannot run the models.", String(error));
}

async function begin() {
  byId("count").textContent = settings.labels.length;
  byId("tolerance").textContent = settings.tolerance;
  byId("commit").textContent = settings.commit;
  takeTestDigit(0);
  try {
    models = await loadModels(settings);
  } catch (error) {
    return failed(error);
  }
  byId("all").disabled = false;
  byId("all").addEventListener("click", () => {
    busy = busy.then(() => runAll(models, settings, testPixels)).catch(failed);
  });
  changed();
}

addEventListener("DOMContentLoaded", begin); // the files come after the scripts
