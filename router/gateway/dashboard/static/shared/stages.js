// The stages of one request, from the timeline that comes with its answer. Pure.

// The stages of a request in order, as [name, start, end] in seconds from its arrival. The stages are
// those of one attempt: of several, each is one row, with its workers and the gap until the next one.
export function stagesOf(timeline, e2e) {
  const { stays, route_s: routed } = timeline;
  if (stays.length > 1) {
    const rows = stays.map((each) => ["attempt", each.placed_s, each.ended_s ?? e2e, [...new Set([each.prefill_worker, each.decode_worker])].join(" → ")]);
    return [["route", 0, routed], ["queue", routed, stays[0].placed_s], ...rows];
  }
  const found = [];
  let at = 0;
  for (const name of ["route", "queue", "prefill_queue", "prefill_compute"]) {
    const length = timeline[`${name}_s`] ?? 0;
    found.push([name, at, at + length]);
    at += length;
  }
  const first = at;
  const transfer = timeline.kv_transfer_s ?? 0;
  const exposed = Math.min(timeline.kv_exposed_s ?? 0, transfer);
  if (transfer > exposed) found.push(["kv_hidden", Math.max(0, first - (transfer - exposed)), first]);
  if (timeline.kv_wait_s) found.push(["kv_wait", at, (at += timeline.kv_wait_s)]);
  if (timeline.decode_queue_s) found.push(["decode_queue", at, (at += timeline.decode_queue_s)]);
  if (e2e > at && timeline.prefill_worker) found.push(["decode_steps", at, e2e]);
  return found;
}
