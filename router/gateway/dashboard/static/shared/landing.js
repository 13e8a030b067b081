import { byId, fillBar, setText } from "./common.js";

fillBar("/");
setText(byId("base"), `${location.origin}/v1`);
const ready = byId("ready");
async function look() {
  try {
    const [answer, version] = await Promise.all([fetch("/ready"), fetch("/version")]);
    const { reason } = await answer.json();
    const name = (await version.json()).version;
    setText(ready, answer.ok ? `● Ready. Version ${name}` : `● Not ready: ${reason}`);
    ready.className = `status ${answer.ok ? "good" : "warn"}`;
  } catch {
    setText(ready, "● The server does not answer");
    ready.className = "status bad";
  }
}
look();
setInterval(look, 5000);
