// A drawing, reduced to what the models were trained on.
//
// The digits of the UCI set were written on forms, scanned, and fitted to bitmaps of 32 x 32 pixels. Each block of 4 x 4
// pixels was then counted: 8 x 8 numbers from 0 (paper) to 16 (ink). All of them fill the whole height and leave a margin
// at the left and right, and a digit has about as much ink as any other, a 1 as much as an 8. Here the same is done with
// the strokes of a pen: they are moved and scaled into the box, and as many of the nearest pixels as a training digit has
// on average become ink. So neither the size of the drawing nor the width of the pen matters.

const SIDE = 32; // of the bitmap
const BLOCK = 4; // of one number
const TALL = 28; // the height of the strokes in it: the ink reaches about two pixels beyond
const WIDE = 20; // their width at most; wider drawings are squeezed, as the wide digits of the set were

// strokes: [[x, y], ...] for each; ink: pixels. Gives 64 counts, row by row.
function reducedDrawing(strokes, ink) {
  const lines = fitted(strokes);
  const distances = [];
  for (let row = 0; row < SIDE; row++)
    for (let column = 0; column < SIDE; column++)
      distances.push(distanceToLines(column + 0.5, row + 0.5, lines));
  // Pixels that are equally near become ink together, whatever rounding says.
  const reach = distances.slice().sort((a, b) => a - b)[ink - 1] + 1e-9;
  const counts = new Array((SIDE / BLOCK) ** 2).fill(0);
  distances.forEach((distance, i) => {
    const row = Math.floor(i / SIDE / BLOCK);
    const column = Math.floor((i % SIDE) / BLOCK);
    if (distance <= reach) counts[(row * SIDE) / BLOCK + column] += 1;
  });
  return counts;
}

// The strokes as line segments [x, y, x', y'] in the bitmap, centred in it.
function fitted(strokes) {
  const points = strokes.flat();
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [left, right, top, bottom] = [
    Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys),
  ];
  const [width, height] = [right - left, bottom - top];
  // A drawing more than twice as wide as high is no digit: its height is not blown up.
  const down = TALL / Math.max(height, width / 2, 1e-9);
  const across = Math.min(down, WIDE / Math.max(width, 1e-9));
  const place = ([x, y]) => [
    SIDE / 2 + (x - (left + right) / 2) * across,
    SIDE / 2 + (y - (top + bottom) / 2) * down,
  ];
  return strokes.flatMap((stroke) => {
    const placed = stroke.map(place);
    return placed.map((point, i) => [...placed[Math.max(i - 1, 0)], ...point]);
  });
}

// The squared distance of a point to the nearest segment.
function distanceToLines(x, y, lines) {
  let nearest = Infinity;
  for (const [ax, ay, bx, by] of lines) {
    const [dx, dy] = [bx - ax, by - ay];
    const length = dx * dx + dy * dy;
    const along = length ? ((x - ax) * dx + (y - ay) * dy) / length : 0;
    const t = Math.min(Math.max(along, 0), 1);
    const [ex, ey] = [ax + t * dx - x, ay + t * dy - y];
    nearest = Math.min(nearest, ex * ex + ey * ey);
  }
  return nearest;
}
