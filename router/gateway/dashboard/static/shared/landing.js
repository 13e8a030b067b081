import { byId, fillBar, setText } from "./common.js";
import { readiness } from "./text.js";

fillBar("/");
setText(byId("base"), `${location.origin}/v1`);
const ready = byId("ready");
async function look() {
  try {
    const [answer, version] = await Promise.all([fetch("/ready"), fetch("/version")]);
    const [text, kind] = readiness(await answer.json(), (await version.json()).version);
    setText(ready, text);
    ready.className = `status ${kind}`;
  } catch {
    setText(ready, "● The server does not answer");
    ready.className = "status bad";
  }
}
look();
setInterval(look, 5000);
