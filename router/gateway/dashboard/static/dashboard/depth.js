// Prepares lanes: the segments of requests in groups, in rows, or as a depth. Pure.

export const MAX_ROWS = 8; // in one lane; more requests at once are drawn as a depth
const MOST_KNOWN = 128; // running requests that one gateway reports
export const STAGES = ["decode_steps", "decode_queue", "kv_wait", "prefill_compute", "prefill_queue", "queue", "stalled"]; // of a depth, from below

// Groups of segments by lane, one for each request. Segments are [stage, start, end].
export function groupsOf(requests, from) {
  const lanes = new Map();
  for (const request of requests) {
    const mine = new Map();
    for (const [lane, stage, start, end] of request.segments) {
      if (request.received_s + end <= from) continue;
      if (!mine.has(lane)) mine.set(lane, []);
      mine.get(lane).push([stage, request.received_s + start, request.received_s + end]);
    }
    for (const [lane, segments] of mine) {
      if (!lanes.has(lane)) lanes.set(lane, []);
      lanes.get(lane).push({ request, segments, start: Math.min(...segments.map((each) => each[1])), end: Math.max(...segments.map((each) => each[2])) });
    }
  }
  return lanes;
}

// Gives each group a row of its lane. Returns the number of rows, which is how many run at once.
export function pack(groups) {
  const ends = [];
  for (const group of groups.sort((a, b) => a.start - b.start)) {
    let row = ends.findIndex((end) => end <= group.start);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = group.end;
    group.row = row;
  }
  return ends.length;
}

// How many requests are in each stage, in `bins` equal parts of the time. Short ones fill one part.
export function depthOf(groups, from, span, bins) {
  const depth = new Map(STAGES.map((stage) => [stage, new Array(bins).fill(0)]));
  const width = span / bins;
  for (const { segments } of groups) {
    for (const [stage, start, end] of segments) {
      const counts = depth.get(stage);
      if (!counts || start >= from + span) continue;
      const first = Math.max(0, Math.round((start - from) / width));
      const last = Math.max(first + 1, Math.round((end - from) / width));
      for (let bin = first; bin < Math.min(last, bins); bin += 1) counts[bin] += 1;
    }
  }
  return depth;
}

// The highest sum of all stages.
export function highest(depth) {
  const columns = [...depth.values()];
  return columns[0].reduce((most, _, bin) => Math.max(most, columns.reduce((total, each) => total + each[bin], 0)), 0);
}

// The note if some running requests are not known here: each gateway reports its oldest ones.
export const leftOut = (known, inFlight) => (inFlight > known && known >= MOST_KNOWN ? `${known} of ${inFlight} requests that run are drawn, the oldest` : "");

// Names of the first requests, and how many more there are.
export function named(requests, most = MAX_ROWS) {
  const names = requests.slice(0, most).map((each) => each.id);
  return requests.length > most ? [...names, `+${requests.length - most} more`] : names;
}
