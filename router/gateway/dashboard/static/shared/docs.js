// The bar and the colours of the other pages, for the page of the API, which is made by the server.

import { byId, fillBar, isShortcut, turnTheme } from "./common.js";

byId("bar").replaceChildren();
fillBar("/docs");
document.addEventListener("keydown", (event) => { if (isShortcut(event) && event.key === "t") turnTheme(); });
